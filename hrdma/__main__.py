"""`python -m hrdma`: the `hrdma` command."""

from hrdma.cli import main

if __name__ == "__main__":
    main()
