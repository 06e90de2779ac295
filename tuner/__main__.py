"""`python -m tuner` is `tune`."""

from tuner.cli import run

run()
