"""`python -m sojourn`: the command line."""

from sojourn.cli.main import run

run()
