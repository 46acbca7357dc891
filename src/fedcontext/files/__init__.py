"""Files: replaced atomically, locked, with checksums and bounded parsers."""
