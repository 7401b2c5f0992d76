"""`python -m rayloader`: the command line."""

from rayloader.cli import main

main()
