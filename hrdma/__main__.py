"""`python -m hrdma`: the `hrdma` command."""

from hrdma.cli import main

main()
