"""Products whose weight is converted on its way into the tensor cores.

Without a GPU all of it, copies, barriers and products included, runs in an emulation that takes
threads and copies in any order (`wgmma_emulation.hpp`).
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
from test_half_products import filled

from tuner.kernel.family import builtin_folder
from tuner.kernel.rendering import rendered

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ on the PATH")
NAMES = ("product_n", "product_k", "product_cluster", "product_raster")
TILES = [(256, 64, 1, 8), (192, 32, 1, 0), (128, 64, 2, 1)]
SHAPES = [(70, 131, 268), (300, 258, 72), (128, 128, 256), (257, 40, 4)]  # rows, columns, depth


def text_of(tile: tuple[int, ...], roots: list[Path]) -> str:
    """The CUDA C++ of a tile."""
    known = {**dict(zip(NAMES, tile, strict=True)), "product_weight": "converted", "epilogues": ""}
    text = rendered(Path("t.py"), '{% include "_lib/triton_wgmma.py" %}', roots, known)
    found = re.search(r'CudaCode\(\s*r"""(.*?)"""', text, re.DOTALL)
    assert found is not None
    return found[1]


@functools.cache
def emulated(tile: tuple[int, ...]):
    """The function that starts a product in an emulation of a tile's kernels."""
    folder = Path(tempfile.mkdtemp())
    own = folder / "_lib" / "wgmma_products.cuh"
    own.parent.mkdir()
    own.write_text("EMULATED_PRODUCTS({{ block_n }})\n")
    text = text_of(tile, [folder, builtin_folder()])
    text = text[text.index("// A product of float32 rows whose weight stays float32") :]
    text = text.replace("extern __shared__ unsigned char shared[]", "static unsigned char shared[1]")
    (folder / "converted.cuh").write_text(text)
    here = Path(__file__).parent
    command = ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-ffp-contract=off"]
    command += ["-shared", "-fPIC", f"-I{folder}", f"-I{here}", "-o", str(folder / "made.so")]
    subprocess.run([*command, str(here / "converted_products.cpp")], check=True)
    function = ctypes.CDLL(str(folder / "made.so")).multiply
    function.restype = ctypes.c_char_p
    return function


def product(tile, x, weight, bias=None, added=None, seed=0) -> torch.Tensor:
    """out = x weight^T + bias, and twice that plus `added` where that is given."""
    (rows, depth), columns = x.shape, len(weight)
    out = torch.full((rows, columns), float("nan"))
    numbers = rows * (-(-depth // 16) * 16 + 2) + columns
    room = torch.full((numbers,), float("nan"))
    given = (x, weight, bias, out, room, added)
    pointers = [ctypes.c_void_p(None if t is None else t.data_ptr()) for t in given]
    message = emulated(tile)(*pointers, *map(ctypes.c_int64, (rows, columns, depth, seed)))
    assert message is None, message
    return out


def assert_as_exact(mine: torch.Tensor, x, weight, bias=None) -> None:
    """At most twice the error of PyTorch's own, whose infinities and NaN it has."""
    own = torch.nn.functional.linear(x, weight, bias)
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    assert torch.equal(mine.isnan(), own.isnan()) and torch.equal(mine.isinf(), own.isinf())
    finite = own.isfinite() & exact.isfinite()
    error, limit = ((y.double() - exact)[finite].abs().max() for y in (mine, own))
    scale = exact[finite].abs().max()
    assert error <= 2 * limit + 2.0**-23 * scale, (float(error / scale), float(limit / scale))


@needs_gxx
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_number_is_made_of_the_right_ones(shape, tile):
    rows, columns, depth = shape
    x, weight, bias = torch.randn(rows, depth), torch.randn(columns, depth), torch.randn(columns)
    assert_as_exact(product(tile, x, weight, bias, seed=rows), x, weight, bias)


if __name__ == "__main__":
    import time
    for tile in TILES:
        s = time.time(); emulated(tile); print(tile, "compiled", time.time() - s)
        for shape in SHAPES:
            s = time.time()
            test_every_number_is_made_of_the_right_ones(shape, tile)
            print(tile, shape, time.time() - s, flush=True)
