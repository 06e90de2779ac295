"""`python -m tuner` is `tune`."""

from tuner.cli import main

main()
