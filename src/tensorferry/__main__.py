"""`python -m tensorferry` is the `tensorferry` command."""

from tensorferry.cli.main import main

main()
