"""Convolutions by Hopper's products: every address, in an emulation of copies and products."""

from __future__ import annotations

import ast
import ctypes
import functools
import itertools
import math
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tuner.kernel.family import builtin_folder
from tuner.kernel.rendering import rendered

# Samples, channels, those of the result, size, filter, stride, pad, dilation, transposed, and
# how many more pixels such a result has.
CASES = {
    "8 channels": (2, 8, 20, (18, 23), (3, 3), (1, 1), (1, 1), (1, 1), False, 0),
    "16 channels": (1, 16, 70, (18, 26), (3, 3), (1, 1), (0, 0), (1, 1), False, 0),
    "24 channels": (1, 24, 16, (12, 23), (5, 7), (1, 1), (2, 0), (1, 1), False, 0),
    "one place": (1, 40, 20, (9, 70), (1, 1), (1, 1), (0, 0), (1, 1), False, 0),
    "3D": (1, 8, 20, (6, 11, 9), (3, 3, 3), (1, 1, 1), (1, 0, 1), (1, 1, 1), False, 0),
    "1D": (2, 16, 20, (300,), (3,), (1,), (0,), (1,), False, 0),
    "dilated": (1, 16, 20, (18, 23), (3, 3), (1, 1), (1, 2), (2, 3), False, 0),
    "transposed": (1, 16, 20, (10, 14), (3, 3), (2, 2), (1, 1), (1, 1), True, 1),
    "transposed, odd": (2, 8, 70, (5, 13), (4, 5), (2, 2), (1, 2), (1, 1), True, 0),
    "transposed in x": (1, 8, 20, (7, 13), (3, 2), (1, 2), (1, 0), (1, 1), True, 0),
    "transposed 3D": (1, 3, 16, (5, 6, 7), (3, 4, 3), (2, 1, 2), (1, 1, 1), (1, 1, 1), True, 0),
    "transposed line": (2, 8, 20, (130,), (4,), (2,), (1,), (1,), True, 0),
    "transposed, dilated": (1, 32, 20, (130,), (5,), (1,), (0,), (3,), True, 0),
    "phases without places": (1, 4, 20, (3, 4), (2, 2), (3, 3), (0, 0), (1, 1), True, 0),
}
TILES = [(2, 1, 64, 2), (2, 2, 32, 1), (4, 1, 16, 2)]  # consumers, groups, part, blocks
IS_PAIRED, KEPT_STEPS = 14 + 35, 14 + 36  # among the numbers, behind those of the source


def functions(tile: tuple[int, int, int, int], halves: int, **turned_off: str) -> dict:
    """The template's functions that need neither Triton nor a GPU."""
    names = ("image_consumers", "image_groups", "image_part", "image_blocks")
    known = {**dict(zip(names, tile, strict=True)), "image_halves": halves, "epilogues": ""}
    text = '{% include "_lib/triton_convolutions_wgmma.py" %}'
    found: dict = {
        "torch": torch, "functools": functools, "itertools": itertools, "math": math,
    }  # fmt: skip
    own = ("convolution_in_one_direction", "convolution_of", "convolution_parts")
    for node in ast.parse(rendered(Path("t.py"), text, [builtin_folder()], known)).body:
        is_own = isinstance(node, ast.FunctionDef) and (
            node.name in own or node.name.startswith("image_")
        )
        if is_own or (isinstance(node, ast.Assign) and ast.unparse(node).startswith("IMAGE_")):
            exec(ast.unparse(node), found)
    found.update(turned_off)
    return found


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    made = tmp_path_factory.mktemp("emulated") / "emulated.so"
    source = Path(__file__).with_name("image_products.cpp")
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{builtin_folder() / '_lib'}"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    library = ctypes.CDLL(str(made))
    library.convolve.restype = library.check_tasks.restype = ctypes.c_char_p
    return library


def convolved(emulated, name, tile, halves, names) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """What the emulation makes of a case, what is right, and the numbers of the geometry."""
    samples, channels, columns, size, kernel, stride, pad, dilation, is_transposed, more = CASES[
        name
    ]
    consumers, groups, part, _ = tile
    generator = torch.Generator().manual_seed(0)
    filters = (channels, columns) if is_transposed else (columns, channels)
    x = torch.randn(2, samples, channels, *size, generator=generator, dtype=torch.float64)
    w = torch.randn(2, *filters, *kernel, generator=generator, dtype=torch.float64)

    def made(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        extra = [more] * len(size)
        return torch.convolution(one, other, None, stride, pad, dilation, is_transposed, extra, 1)

    expected = made(x[0], w[0])
    if halves == 2:
        expected = expected + made(x[1], w[0]) + made(x[0], w[1])
    geometry = (*stride, *pad, *dilation, *expected.shape[2:])
    _, (numbers, _, sizes) = names["image_numbers"](
        tuple(x.shape[3:]), tuple(w.shape[3:]), is_transposed, geometry, samples, channels,
        columns, *tile,
    )  # fmt: skip
    out, stored = torch.zeros_like(expected), torch.zeros(expected.shape, dtype=torch.int32)
    counts = (len(numbers), x[0].numel(), w[0].numel(), *sizes)
    message = emulated.convolve(
        *(ctypes.c_void_p(t.data_ptr()) for t in (x, w, out, stored, numbers)),
        *map(ctypes.c_int64, counts), halves, part, consumers * groups, 7,
    )  # fmt: skip
    assert message is None
    assert (stored == 1).all()
    return out, expected, numbers.tolist()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_pixel_is_made_once_of_the_right_numbers(name, tile, emulated):
    out, expected, _ = convolved(emulated, name, tile, 2, functions(tile, 2))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_of_one_product_as_well(name, emulated):
    out, expected, _ = convolved(emulated, name, TILES[0], 1, functions(TILES[0], 1))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_what_can_be_turned_off_changes_nothing(name, emulated):
    off = {"IMAGE_CAN_PAIR": False, "IMAGE_KEEPS_FILTERS": False}
    _, _, on = convolved(emulated, name, TILES[1], 2, functions(TILES[1], 2))
    out, expected, numbers = convolved(emulated, name, TILES[1], 2, functions(TILES[1], 2, **off))
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    assert numbers[IS_PAIRED] == numbers[KEPT_STEPS] == 0
    # Blocks that take tiles of several phases have channels of several tiles.
    assert (on[KEPT_STEPS] > 0) == (name != "transposed, odd")
    assert on[IS_PAIRED] == (CASES[name][8] and CASES[name][5][-1] == 2)


@pytest.mark.parametrize("rows", [16, 300])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (5, 8, 67), (128, 64, 134), (9, 1, 1), (2, 2592, 9)])
@pytest.mark.parametrize("num_bytes", [4, 2**22, 2**30])
def test_halves_are_made_once_behind_what_they_wait_for(rows, sizes, num_bytes, emulated):
    assert emulated.check_tasks(rows, *sizes, ctypes.c_int64(num_bytes)) is None


def test_what_is_not_for_the_kernel_remains_tritons():
    names = functions((2, 1, 64, 2), 2)
    x, w = torch.empty(1, 8, 40, 40), torch.empty(16, 8, 3, 3)
    for stride, dilation in (((2, 1), (1, 1)), ((1, 1), (60, 1))):
        geometry = (*stride, 64, 0, *dilation, 20, 20)
        of = names["convolution_of"](tuple(x.shape[2:]), tuple(w.shape[2:]), False, geometry)
        assert names["image_tiles"](tuple(of.items()), 1, 1, 16, 2, 1, 64, 2, 2) is None
