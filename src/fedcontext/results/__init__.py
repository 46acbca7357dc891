"""Records of runs read back: summaries, tables, export."""
