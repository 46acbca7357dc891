"""`python -m fedcontext`: the command line."""

from fedcontext.cli import main

if __name__ == "__main__":
    main()
