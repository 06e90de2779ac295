"""The command `tune`, which `python -m tuner` is as well."""

import sys

INTERRUPTED = 130  # as `tuner.command.cli` exits, which takes 0.6 s to import


def run() -> None:
    """Be the command, also where Ctrl-C comes before it is imported."""
    try:
        from tuner.command import cli
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    cli.run()


if __name__ == "__main__":
    run()
