"""`python -m fedcontext`: the command line."""

from fedcontext.cli import main

main()
