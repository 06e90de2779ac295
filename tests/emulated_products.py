"""CUDA C++ of products whose weight is converted, compiled for the host.

`wgmma_emulation.hpp` says what of the GPU is emulated.
"""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
import tempfile
from pathlib import Path

import torch

_HERE = Path(__file__).parent
_BEGIN = "// A product of float32 rows whose weight stays float32"
_PRODUCTS = re.compile(r"namespace wgmma_products {.*?}  // namespace wgmma_products\n", re.DOTALL)


class EmulatedCode:
    """What `CudaCode` is where there is a GPU: functions by name, with tensors, numbers, None."""

    def __init__(self, text: str, flags: object = None) -> None:
        self.library = _compiled(text)
        self.library.use_seed(0)
        self.called: list[str] = []

    def __call__(self, name: str, *arguments: torch.Tensor | int | None) -> None:
        self.called.append(name)
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        given = [
            ctypes.c_int64(value)
            if isinstance(value, int)
            else ctypes.c_void_p(None if value is None else value.data_ptr())
            for value in arguments
        ]
        message = function(*given, None)
        assert message is None, message


@functools.cache
def _compiled(text: str) -> ctypes.CDLL:
    """Compile a text's part about such products, with those of Hopper emulated."""
    text = text[text.index(_BEGIN) :]
    columns = re.search(r"constexpr int kColumns = (\d+);", text)
    assert columns is not None
    text = _PRODUCTS.sub(f"EMULATED_PRODUCTS({columns[1]})\n", text, count=1)
    text = text.replace(
        "extern __shared__ unsigned char shared[]", "static unsigned char shared[1]"
    )
    folder = Path(tempfile.mkdtemp())
    (folder / "converted.cuh").write_text(text)
    command = ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-ffp-contract=off"]
    command += ["-shared", "-fPIC", f"-I{folder}", f"-I{_HERE}", "-o", str(folder / "made.so")]
    subprocess.run([*command, str(_HERE / "converted_products.cpp")], check=True)
    return ctypes.CDLL(str(folder / "made.so"))
