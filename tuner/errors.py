"""Every failure that the tuner itself can report, drawn as one tree.

    TunerError                      what the command line shows without a traceback
    ├── InputError          exit 2  the user's files or arguments are wrong
    │   ├── ConfigError             the YAML file: every error at once
    │   ├── ExpressionError         one constraint or shape expression
    │   ├── TemplateError           a template's head, its text, or its rendering
    │   ├── ProblemError            the reference file or its inputs
    │   └── CaptureError            a module whose forward cannot be recorded as a graph
    ├── NothingToGainError  exit 0  PyTorch is as fast as the device allows: no search was begun
    ├── NothingCorrectError exit 1  the search ended without one correct candidate
    └── MachineError        exit 3  the machine, not the user
        ├── ToolchainError          no compiler, or one that does not work
        ├── DeviceError             no such device, or it went away
        ├── StorageError            no space, no permission, an unreadable run
        │   └── NoRunError  exit 2  what was named is none
        ├── RunLockedError          another process works on this run
        └── WorkerError             the child process died or did not answer (see `worker`)

A candidate that does not compile, crashes, hangs or is wrong is no exception: it is an
`Outcome` with a status and a reason (see `trial`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches

__all__ = [
    "CaptureError",
    "ConfigError",
    "DeviceError",
    "ExpressionError",
    "InputError",
    "MachineError",
    "NoRunError",
    "NothingCorrectError",
    "NothingToGainError",
    "ProblemError",
    "RunLockedError",
    "StorageError",
    "TemplateError",
    "ToolchainError",
    "TunerError",
    "WorkerError",
    "did_you_mean",
    "error_of",
    "input_errors",
    "says_no_memory",
]

# How PyTorch and Python say that memory ran out, on a GPU and elsewhere.
NO_MEMORY = (
    "OutOfMemoryError", "out of memory", "can't allocate memory", "MemoryError",
    # As libraries say it, which ask the driver for memory of their own.
    "_ALLOC_FAILED", "_ALLOCATION_FAILED",
)  # fmt: skip


class TunerError(Exception):
    """A failure that is explained to the user in full by its message."""

    exit_code = 3


class InputError(TunerError):
    """The user's files or arguments are wrong."""

    exit_code = 2


class ConfigError(InputError):
    """The configuration is wrong; `problems` holds every error found, in file order."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class ExpressionError(InputError):
    """An expression is outside the grammar, uses an unknown name, or cannot be computed."""


class TemplateError(InputError):
    """A template's head or text is wrong, or does not render."""


class ProblemError(InputError):
    """The reference file cannot be used as a problem."""


class CaptureError(InputError):
    """A module's forward cannot be recorded as a graph."""


class NothingCorrectError(TunerError):
    """The search ended and no candidate was correct."""

    exit_code = 1


class NothingToGainError(TunerError):
    """PyTorch is as fast as the device allows, so nothing was searched; `numbers` say so."""

    exit_code = 0

    def __init__(self, message: str, numbers: Mapping[str, object]) -> None:
        self.numbers = dict(numbers)
        super().__init__(message)


class MachineError(TunerError):
    """The machine cannot do what was asked."""


class ToolchainError(MachineError):
    """A compiler is missing or does not work."""


class DeviceError(MachineError):
    """The device does not exist, or went away."""


class StorageError(MachineError):
    """A file of ours cannot be written or read."""


class NoRunError(StorageError):
    """What was named is no run, nor was it ever one."""

    exit_code = 2


class RunLockedError(MachineError):
    """Another process works on this run directory."""


class WorkerError(MachineError):
    """The child process that owns the device failed."""


def error_of(kind: str, message: str, else_said: str) -> TunerError:
    """Return the error that another process raised, by the name of its class.

    One that is none of these is a WorkerError, with `else_said`.
    """
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, TunerError) and found is not ConfigError:
        return found(message)
    return WorkerError(else_said)


def says_no_memory(text: str) -> bool:
    """Whether an error is that memory ran out, which no module means by it."""
    return any(words in text for words in NO_MEMORY)


@contextmanager
def input_errors(where: str = "") -> Iterator[None]:
    """Turn a ValueError inside into an InputError, which says where."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{where}: {error}" if where else str(error)) from error


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Return `hint: did you mean 'x'?` for the closest of `known`, or an empty string."""
    close = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"hint: did you mean {close[0]!r}?" if close else ""
