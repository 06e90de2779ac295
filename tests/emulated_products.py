"""CUDA C++ of products by float16 halves, compiled for the host.

`wgmma_emulation.hpp` says what of the GPU is emulated.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any

import torch
from shared_builds import GOLD, built_once, header_built_once

from tuner.evaluate.modules import fused, module_of
from tuner.kernel.binding import bind
from tuner.kernel.family import Family, builtin_folder
from tuner.kernel.rendering import rendered
from tuner.machine.datasheets import known_device
from tuner.trial import Params

_HERE = Path(__file__).parent
_BEGIN = "// A product of float32 rows from float16 halves of both operands"
_WARP_PRODUCTS = re.compile(
    r"namespace warp_products {.*?}  // namespace warp_products\n", re.DOTALL
)
_PRODUCTS = re.compile(r"namespace wgmma_products {.*?}  // namespace wgmma_products\n", re.DOTALL)


class EmulatedCode:
    """What `CudaCode` is where there is a GPU: functions by name, with tensors, numbers, None."""

    def __init__(self, text: str, flags: object = None) -> None:
        self.library = _compiled(text)
        self.library.use_seed(0)
        self.library.num_copies.restype = ctypes.c_int64
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


def emulated_code(
    tile: tuple[int, int, int, int], product_weight: str, epilogues: str = ""
) -> EmulatedCode:
    """Return the kernels of a tile: product_n, product_k, product_cluster and product_raster."""
    names = ("product_n", "product_k", "product_cluster", "product_raster")
    known = {**dict(zip(names, tile, strict=True)), "product_weight": product_weight}
    text = '{% include "_lib/triton_wgmma.py" %}'
    known |= {"epilogues": epilogues, "product_weights": ["rows", "columns"]}
    found = rendered(Path("t.py"), text, [builtin_folder()], known)
    found = found[found.index('r"""') : found.index("def product_converts")]
    return EmulatedCode(found[: found.rindex('"""')])


def emulated_model(family: Family, params: Params, folder: Path) -> tuple[Any, EmulatedCode]:
    """Return a `ModelNew` whose products are emulated, and what calls their kernels.

    Args:
        family: of a module, written for the H200.
        params: its template and parameters.
        folder: where its source is written.
    """
    candidate = family.render(params, known_device("H200").facts())
    own = "from emulated_products import EmulatedCode\n\ncuda_code = EmulatedCode("
    source = folder / "source.py"
    source.write_text(candidate.source.replace("cuda_code = CudaCode(", own))
    operator = bind(candidate.plan, "triton", source)
    module = module_of(family.model_new)
    module |= {**fused(operator), "fused_device": "cpu"}
    return module["ModelNew"](), operator.globals["cuda_code"]


@functools.cache
def _compiled(text: str) -> ctypes.CDLL:
    """Compile a text's part about such products, with those of Hopper emulated."""

    def emulated(found: re.Match[str]) -> str:
        columns = re.search(r"constexpr int kColumns = (\d+);", found[0])
        assert columns is not None
        return f"EMULATED_PRODUCTS({columns[1]})\n"

    text = _PRODUCTS.sub(emulated, text[text.index(_BEGIN) :])
    text = _WARP_PRODUCTS.sub("namespace warp_products = emulated::warp_products;\n", text)
    text = text.replace(
        "extern __shared__ unsigned char shared[]", "static unsigned char shared[1]"
    )
    whole = _HERE.joinpath("emulated_products.cpp").read_text()
    headers = _HERE.joinpath("wgmma_emulated_headers.hpp").read_text()
    for include, own in (("wgmma_emulated_headers.hpp", headers), ("products.cuh", text)):
        whole = whole.replace(f'#include "{include}"\n', own)
    command = ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-ffp-contract=off"]
    command += ["-shared", "-fPIC", *GOLD]
    # What it includes of the standard library is most of the compiler's work.
    command += header_built_once(_HERE / "wgmma_emulation.hpp", command)
    return ctypes.CDLL(str(built_once(whole, ".cc", command)[0]))
