"""`python -m millrace`."""

from millrace.cli.app import main

main()
