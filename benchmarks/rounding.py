"""Operands and sums as tensor cores have them, emulated on a CPU: for `precision`.

What is emulated of a tensor core: every product exact; the sum of one instruction's products and
of the accumulator cut off (not rounded) after 25 bits (float16) or 14 bits (float8). 14 is what
DeepSeek-V3's report (arXiv 2412.19437, section 3.3.2) found on Hopper; 25 is fitted: it gives
6.4e-6 rms where an H200 has 4.8e-6 (three products in sweeps, #33), so the model errs upwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LARGEST_EXPONENT = 13  # of a row once it is scaled, as wgmma_operands.cuh has it
FLOAT8_SHIFT = 6  # e4m3 holds rows times 2^-6 and rests times 2^6
STAGE_K = 64  # elements of k with one power of two of their own, and between promotions
INTEGER_DISTANCE = 0.8  # of a factor that is guessed from the first GUESSED_K elements of a row
GUESSED_K = 512

# ---- formats --------------------------------------------------------------------------------


def _to(values: torch.Tensor, dtype: torch.dtype, largest: float) -> torch.Tensor:
    return values.clamp(-largest, largest).to(dtype).float()


def fp16(v: torch.Tensor) -> torch.Tensor:
    """Round to float16."""
    return v.half().float()


def bf16(v: torch.Tensor) -> torch.Tensor:
    """Round to bfloat16."""
    return v.bfloat16().float()


def _e4m3(v: torch.Tensor) -> torch.Tensor:
    return _to(v, torch.float8_e4m3fn, 448.0)  # satfinite


def _e5m2(v: torch.Tensor) -> torch.Tensor:
    return _to(v, torch.float8_e5m2, 57344.0)


def _int8(v: torch.Tensor) -> torch.Tensor:
    return v.round().clamp(-127.0, 127.0)


DOWN, UP = 2.0**-FLOAT8_SHIFT, 2.0**FLOAT8_SHIFT
INT8_DOWN, INT8_UP = 2.0**-7, 2.0**5  # the largest element of a row becomes 64 to 127


def part(name: str, v: torch.Tensor) -> torch.Tensor:
    """Return what one operand of a product holds of scaled rows `v` [rows, k], in v's units.

    "fp16" is the value rounded to float16, "fp16 rest" what that left, in float16; "e4m3 rest",
    "e5m2 rest" and "int8 rest" are what float16 left, in those formats. "e4m3 twice" is two
    pieces, hence two products.
    """
    match name:
        case "exact":
            return v
        case "fp16":
            return fp16(v)
        case "fp16 rest":
            return fp16(v - fp16(v))
        case "bf16":
            return bf16(v)
        case "bf16 rest":
            return bf16(v - bf16(v))
        case "e4m3":
            return _e4m3(v * DOWN) * UP
        case "e4m3 rest":
            return _e4m3((v - fp16(v)) * UP) * DOWN
        case "e4m3 twice":
            first = _e4m3(v * DOWN) * UP
            return first + _e4m3((v - first) / 4) * 4
        case "e5m2":
            return _e5m2(v)
        case "e5m2 rest":
            return _e5m2(v - fp16(v))
        case "int8":
            return _int8(v * INT8_DOWN) / INT8_DOWN
        case "int8 rest":
            return _int8((v - fp16(v)) * INT8_UP) / INT8_UP
    raise ValueError(f"unknown part {name!r}")


def scale_of(values: torch.Tensor, scaled_by: str) -> torch.Tensor:
    """Return powers of two that bring `values` [rows, k] below 2^(LARGEST_EXPONENT + 1).

    One for the "matrix", one a "row", or one for each "stage", STAGE_K elements of a row; of a
    shape that broadcasts to that of `values`. Or factors that are no powers of two: "filled" makes
    the largest element of a row 127 of the steps of "int8"; "guessed" guesses that from the row's
    beginning, at a distance, and takes the other where the guess is too large.
    """
    size = values.abs()
    if scaled_by in ("filled", "guessed"):
        filled = 127.0 / INT8_DOWN / size.amax(1, keepdim=True).clamp_min(1e-30)
        if scaled_by == "filled":
            return filled
        begun = size[:, :GUESSED_K].amax(1, keepdim=True).clamp_min(1e-30)
        guess = INTEGER_DISTANCE * 127.0 / INT8_DOWN / begun
        return torch.where(guess > filled, filled, guess)
    if scaled_by == "matrix":
        size = size.amax().reshape(1, 1)
    elif scaled_by == "row":
        size = size.amax(1, keepdim=True)
    else:
        rows, k = values.shape
        stages = size.reshape(rows, k // STAGE_K, STAGE_K).amax(2, keepdim=True)
        size = stages.expand(-1, -1, STAGE_K).reshape(rows, k)
    exponent = torch.frexp(size).exponent - 1
    return torch.exp2((LARGEST_EXPONENT - exponent).clamp(-114, 126).float())


# ---- sums as a tensor core makes them -------------------------------------------------------


def cut(sums: torch.Tensor, bits: int) -> torch.Tensor:
    """Return float64 sums cut off after `bits` significant bits, towards zero."""
    mask = -1 << (53 - bits)
    return (sums.view(torch.int64) & mask).view(torch.float64)


def summed(
    x: torch.Tensor,
    weight: torch.Tensor,
    products: Sequence[tuple[str, str]],
    *,
    order: str,
    promotes: bool,
) -> torch.Tensor:
    """Return x W^T as Hopper's tensor cores sum it.

    Args:
        x: float32 [rows, k], k a multiple of STAGE_K.
        weight: float32 [columns, k].
        products: of parts, small ones first.
        order: "sweeps", each product over all of k, or "fused", all of them stage by stage.
        promotes: add the accumulator to a float32 sum after each stage.
    """
    x_scale, w_scale = scale_of(x, "row"), scale_of(weight, "row")
    operands = []
    for x_part, w_part in products:
        is_float8 = "e4m3" in x_part
        left = part(x_part, x * x_scale).double()
        right = part(w_part, weight * w_scale).double().T.contiguous()
        operands.append((left, right, 32 if is_float8 else 16, 14 if is_float8 else 25))
    stages = range(0, x.shape[1], STAGE_K)
    turns = [[o] for o in operands] if order == "sweeps" else [operands]
    total = torch.zeros(len(x), len(weight), dtype=torch.float64)
    sums = torch.zeros_like(total)
    for turn in turns:
        for stage in stages:
            for left, right, step, bits in turn:
                for k in range(stage, stage + STAGE_K, step):
                    sums = cut(sums + left[:, k : k + step] @ right[k : k + step], bits)
            if promotes:
                total = (total + sums).float().double()
                sums = torch.zeros_like(total)
    return (total + sums) / (x_scale.double() * w_scale.double().T)
