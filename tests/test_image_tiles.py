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

# Samples, channels, those of the result, size, filter, stride, pad, dilation, transposed, and
# how many more pixels such a result has.
CASES = {
    "8 channels": (2, 8, 20, (18, 23), (3, 3), (1, 1), (1, 1), (1, 1), False, 0),
    "16 channels": (1, 16, 70, (18, 23), (3, 3), (1, 1), (0, 0), (1, 1), False, 0),
    "24 channels": (1, 24, 16, (12, 23), (5, 7), (1, 1), (2, 0), (1, 1), False, 0),
    "one place": (1, 40, 20, (9, 70), (1, 1), (1, 1), (0, 0), (1, 1), False, 0),
    "3D": (1, 8, 20, (6, 11, 9), (3, 3, 3), (1, 1, 1), (1, 0, 1), (1, 1, 1), False, 0),
    "1D": (2, 16, 20, (300,), (3,), (1,), (0,), (1,), False, 0),
    "dilated": (1, 16, 20, (18, 23), (3, 3), (1, 1), (1, 2), (2, 3), False, 0),
    "transposed": (1, 16, 20, (10, 13), (3, 3), (2, 2), (1, 1), (1, 1), True, 1),
    "transposed 3D": (1, 3, 16, (5, 6, 7), (3, 4, 3), (2, 1, 2), (1, 1, 1), (1, 1, 1), True, 0),
    "transposed, dilated": (1, 32, 20, (130,), (5,), (1,), (0,), (3,), True, 0),
    "phases without places": (1, 4, 20, (3, 4), (2, 2), (3, 3), (0, 0), (1, 1), True, 0),
}
TILES = [(2, 1, 64, 2), (2, 2, 32, 1), (4, 1, 16, 2)]  # consumers, groups, part, blocks


def functions() -> dict:
    """The template's functions that need neither Triton nor a GPU."""
    found: dict = {
        "torch": torch, "functools": functools, "itertools": itertools, "math": math,
    }  # fmt: skip
    own = ("convolution_in_one_direction", "convolution_of")
    for name in ("triton_convolutions.py", "triton_convolutions_wgmma.py"):
        text = (builtin_folder() / "_lib" / name).read_text()
        plain = "\n".join(line for line in text.splitlines() if not line.startswith("{%"))
        for node in ast.parse(plain.replace("{{ image_halves }}", "2")).body:
            if isinstance(node, ast.FunctionDef) and (
                node.name in own or node.name.startswith("image_")
            ):
                exec(ast.unparse(node), found)
    return found


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    made = tmp_path_factory.mktemp("emulated") / "emulated.so"
    source = Path(__file__).with_name("image_products.cpp")
    command = ["g++", "-O2", "-std=c++17", "-shared", "-fPIC", f"-I{builtin_folder() / '_lib'}"]
    subprocess.run([*command, "-o", str(made), str(source)], check=True)
    function = ctypes.CDLL(str(made)).convolve
    function.restype = ctypes.c_char_p
    return function


def planes_of(x: torch.Tensor, of: dict) -> torch.Tensor:
    """Planes of 8 channels, with zeros around."""
    samples, channels = x.shape[:2]
    planes = -(-channels // 8)
    made = x.new_zeros(samples, planes * 8, *of["PADDED"])
    own = [slice(low, low + size) for low, size in zip(of["LOW"], of["SIZE"], strict=True)]
    size = [min(s.stop, p) - s.start for s, p in zip(own, of["PADDED"], strict=True)]
    inner = x.reshape(samples, channels, *of["SIZE"])[..., : size[0], : size[1], : size[2]]
    made[(slice(None), slice(0, channels), *own)] = inner
    return made.view(samples, planes, 8, *of["PADDED"]).permute(0, 1, 3, 4, 5, 2).contiguous()


def steps_of(w: torch.Tensor, of: dict, numbers: list[int], about: dict, planes: int):
    """Filters as the products take them: of one half."""
    columns, phases, tiles = numbers[1:4]
    if of["IS_TRANSPOSED"]:
        w = w.transpose(0, 1)
    w = w.reshape(*w.shape[:2], *of["KERNEL"])
    own = of["STRIDE"] if of["IS_TRANSPOSED"] else (1, 1, 1)
    made = w.new_zeros(phases, tiles * about["PART"], about["STEPS"], 16)
    for phase, (pz, py, px) in enumerate(itertools.product(*map(range, own))):
        places = w[:, :, pz :: own[0], py :: own[1], px :: own[2]]
        if of["IS_TRANSPOSED"]:
            places = places.flip(2, 3, 4)
        places = places.flatten(2)
        units = about["CHUNK"] * places.shape[2]
        full = w.new_zeros(columns, planes * 8, places.shape[2])
        full[:, : w.shape[1]] = places
        # Channels of a plane last, behind planes and places.
        full = full.view(columns, about["CHUNKS"], about["CHUNK"], 8, -1).transpose(3, 4)
        full = full.reshape(columns, about["CHUNKS"], units * 8)
        full = torch.nn.functional.pad(full, (0, units % 2 * 8)).reshape(columns, -1, 16)
        made[phase, :columns, : full.shape[1]] = full
    part = made.view(phases, tiles, about["PART"] // 8, 8, about["STEPS"], 2, 8)
    return part.permute(0, 1, 4, 2, 5, 3, 6).flatten(3).contiguous()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_every_pixel_is_made_once_of_the_right_numbers(name, tile, emulated):
    samples, channels, columns, size, kernel, stride, pad, dilation, is_transposed, more = CASES[
        name
    ]
    consumers, groups, part, _ = tile
    generator = torch.Generator().manual_seed(0)
    filters = (channels, columns) if is_transposed else (columns, channels)
    x = torch.randn(2, samples, channels, *size, generator=generator, dtype=torch.float64)
    w = torch.randn(2, *filters, *kernel, generator=generator, dtype=torch.float64)

    def convolved(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        extra = [more] * len(size)
        return torch.convolution(one, other, None, stride, pad, dilation, is_transposed, extra, 1)

    expected = convolved(x[0], w[0]) + convolved(x[1], w[0]) + convolved(x[0], w[1])
    names = functions()
    geometry = (*stride, *pad, *dilation, *expected.shape[2:])
    sizes = (tuple(x[0].shape[2:]), tuple(w[0].shape[2:]))
    of = names["convolution_of"](*sizes, is_transposed, geometry)
    planes = -(-channels // 8)
    found = names["image_tiles"](tuple(of.items()), samples, planes, columns, *tile, 2)
    numbers, about, _, beyond = found
    image = torch.cat([torch.stack([planes_of(half, of) for half in x]).flatten()])
    image = torch.nn.functional.pad(image, (0, 8 * beyond), value=float("nan"))
    halves = [steps_of(half, of, numbers.tolist(), about, planes) for half in w]
    steps = torch.stack(halves, 3).contiguous()
    out, stored = torch.zeros_like(expected), torch.zeros(expected.shape, dtype=torch.int32)
    message = emulated(
        *(ctypes.c_void_p(t.data_ptr()) for t in (image, steps, out, stored, numbers)),
        ctypes.c_int64(len(numbers)), 2, part, consumers * groups,
    )  # fmt: skip
    assert message is None
    assert (stored == 1).all()
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)


def test_what_is_not_for_the_kernel_remains_tritons():
    names = functions()
    x, w = torch.empty(1, 8, 40, 40), torch.empty(16, 8, 3, 3)
    for stride, dilation in (((2, 1), (1, 1)), ((1, 1), (60, 1))):
        geometry = (*stride, 64, 0, *dilation, 20, 20)
        of = names["convolution_of"](tuple(x.shape[2:]), tuple(w.shape[2:]), False, geometry)
        assert names["image_tiles"](tuple(of.items()), 1, 1, 16, 2, 1, 64, 2, 2) is None
