"""Functions of tests in a process of Triton's interpreter.

Triton reads TRITON_INTERPRET when it is imported: each call is a fork of a process that has done
so, since to import PyTorch, Triton and what captures modules takes 5 s of CPU.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tuner.machine.forkserver import ALSO, start_process

__all__ = ["interpreted", "mend_interpreter", "run"]

TIMEOUT_S = 1200.0
# What the tests import that ask for this, and what PyTorch looks up at a first capture.
PRELOADED = "torch._dynamo tests.recorded_once test_steps_of_halves test_batched_modules"


def interpreted(module: str, function: str, *arguments: object) -> None:
    """Call a function of a test's file with arguments that `repr` writes; what it raises fails."""
    script = f"import {module}; {module}.{function}({', '.join(map(repr, arguments))})"
    options = {"path": [*sys.path, str(Path(__file__).parent)], "script": script}
    env = {**os.environ, "TRITON_INTERPRET": "1", ALSO: PRELOADED}
    with tempfile.TemporaryFile() as output:
        process = start_process("interpreted:run", options, env, output.fileno())
        assert process.has_exited(TIMEOUT_S), f"{script} did not end in {TIMEOUT_S:.0f} s"
        code = process.reap()
        output.seek(0)
        assert code == 0, output.read().decode()[-4000:]


def run(script: str, parent_pid: int) -> None:
    """Be that process."""
    mend_interpreter()
    exec(script, {})


def mend_interpreter() -> None:
    """Have Triton's interpreter take bfloat16 for numbers, and numbers of any NumPy."""
    from triton import knobs
    from triton.runtime import interpreter

    assert knobs.runtime.interpret, "Triton was imported without TRITON_INTERPRET"
    builder = interpreter.InterpreterBuilder
    builder.create_dot = dot_of(builder.create_dot)
    interpreter._patch_lang_tensor = patches_of(interpreter._patch_lang_tensor)


def patches_of(own: Any) -> Any:
    """Return the interpreter's patches of its tensors, whose numbers are arrays of one.

    Up to Triton 3.6 it takes these for numbers, as NumPy did until 2.4.
    """

    def patch(tensor: Any, *scope: Any) -> None:
        own(tensor, *scope)
        put = scope[0].set_attr if scope else setattr
        put(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch


def dot_of(own: Any) -> Any:
    """Return the interpreter's product, which up to Triton 3.6 takes bfloat16 for its bits."""
    from triton import language as tl
    from triton.runtime.interpreter import TensorHandle

    def numbers(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

    def dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return own(self, numbers(a), numbers(b), *more)

    return dot
