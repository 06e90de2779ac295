"""Values to ask with: inputs drawn so that errors show, and fresh weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

__all__ = [
    "FAR_OFFSET", "HEAVY_TAILED", "OFFSET", "ORDINARY", "ORDINARY_WEIGHTS", "SPARSE",
    "Distribution", "WeightKind", "draws_all", "fresh_values", "redistributed",
    "seed_everything", "seed_of_inputs", "widened",
]  # fmt: skip

Distribution = Literal[
    "as_given",  # what get_inputs() returns
    "offset",  # the same plus 100: exposes float32 sums of squares
    "heavy_tailed",  # normal times lognormal, clipped to +-1e4
    "normal",
    "wide_range",  # normal, each row scaled by its own power of two, 2^-20 to 2^20
    "wide_columns",  # the same over the last dimension
    "faint_rows",  # normal, each row scaled by its own power of two, 2^-60 to 2^-24
    "tiny",  # as given times 2^-10: a variance near the eps that is added to it
    "few_values",  # -1, 0, 1 and halves within +-8, a row of zeros: what is equal, and kinks
    "special",  # as given, with integers and bools that mean something else
    "edges",  # as given, with 0 and 1 in one input, where answers stay finite
    "constants",  # as given, with the numbers that the reference's text has
    "large_integers",  # as given, and integers of some 2^30
    "negative_integers",  # as given, with one integer of -1
    "integers_beyond",  # as given, with one integer beyond what was given
    "huge",  # normal times 2^28: beyond what an int32, or a float32 as an integer, can hold
    "vast",  # normal times 2^120
    "vast_terms",  # normal times 2^104: sums of millions are no larger than the largest float32
    "denormal",  # normal times 2^-127: nearly all below the least normal float32
    "dyadic",  # multiples of 1/4 within +-2: with dyadic weights products and sums are exact
    "constant_columns",  # dyadic, every row equal
    "nan_row",  # as given, one row NaN
    "nan_elements",  # as given, one NaN first in a row, one last, one in between
    "inf_elements",  # as given, +Inf and -Inf in two rows, in any column
    "negative_inf_row",  # as given, one row -Inf
    "extreme",  # as given, numbers near the largest float32 in two rows, of both signs
    "extreme_terms",  # the same, a sixteenth as large: no sum of a few is beyond the largest
    "masked",  # as given, with -Inf at the start of one row, in the middle of another
    "late_rows",  # as given, later rows with more and more added: 100 to 3000 in the last
    "like_rows",  # in turn: a single 1, mostly zeros, permutations of one row
    "whole_numbers",  # from 0 to 255
    "all_special",  # as given, with integers and bools that all mean something else
    "masked_bools",  # as given, with blocks of bools that are alike
    "special_rows",  # as "special", with Inf and NaN in the rows of labels that are ignored
    "half_range",  # as given, one number of 13 times 100: float16 does not hold all squares
    "far",  # as given plus 4096: beside a mean that is as far away
    "last_integers",  # as given, with integers at the end of what they may be
    "wide_integers",  # as given, with integers of both signs, small types to their ends
    "filled",  # as given, one row all zeros, one with zeros at both ends, one of -10,000
    "sparse",  # as given, 90 % of the numbers 0
]
WeightKind = Literal[
    "random",
    "trained",  # as after training: matrices of their magnitude, vectors near what they were
    "dyadic",  # multiples of 1/16 within +-1: with dyadic inputs products and sums are exact
    "vast",  # as random, but matrices as vast inputs are: for products with denormal inputs
    "denormal",  # as random, but matrices as denormal inputs are: for products with vast ones
    "nan",  # as they are, but one NaN in each matrix and each buffer
]
# Of which no floating-point number is another.
UNCHANGED = (
    "as_given", "edges", "constants", "special", "all_special", "special_rows", "masked_bools",
    "large_integers", "negative_integers", "integers_beyond", "last_integers",
    "wide_integers",
)  # fmt: skip
# Of which every floating-point number is drawn.
DRAWN = (
    "normal", "heavy_tailed", "wide_range", "wide_columns", "faint_rows", "few_values", "dyadic",
    "constant_columns", "like_rows", "whole_numbers", "huge", "vast", "vast_terms",
    "denormal",
)  # fmt: skip
FAR_OFFSET = 4096.0  # where float32 keeps 11 bits of what is behind the point
HALF_FACTOR = 100.0  # some squares are beyond 65504 then, their mean in a row is not
EXTREMES = {"extreme": 0.9, "extreme_terms": 0.9 / 16}  # of the largest number
EXPONENTS = {"huge": 28, "vast": 120, "vast_terms": 104, "denormal": -127}
# 2^20 is outside float16's range, and its square well inside float32's; so is that of 2^-60, which
# is far below any number that a norm or a logarithm is kept away from 0 by.
BITS = {"wide_range": (-20, 20), "wide_columns": (-20, 20), "faint_rows": (-60, -24)}
LATE_OFFSETS = (100.0, 3000.0)  # where float32 keeps four digits of a row that varies by 1
MOST_LOOKED_AT = 17  # rows at the start that a guard may look at
ORDINARY_WEIGHTS = "weights as after training"  # values to time on, in words
ORDINARY = f"{ORDINARY_WEIGHTS} and normal inputs"
OFFSET = "inputs plus 100"
HEAVY_TAILED = "heavy-tailed inputs"
SPARSE = "inputs of which 90 % are 0"
SPARSE_SHARE = 0.9  # of their numbers are 0
OUTLIER_SHARE, OUTLIER_FACTOR = 0.01, 10.0  # of trained weights
HEAVY_TAIL_SIGMA = 1.5  # of the lognormal factor: about 1 value in 1000 above 100
HEAVY_TAIL_CLIP = 1e4  # finite, and within float16's range (65504)


def seed_of_inputs(weight_seed: int) -> int:
    """Return the seed for inputs of a module whose weights were drawn by that one.

    By the same seed, as KernelBench draws both, rows of a uniform weight are the inputs' own
    numbers: each sample's product with one of them is far larger than all others, which no data of
    a user are like, and a softmax behind it has gradients of 2^25 times the range.
    """
    return weight_seed + 1


def seed_everything(seed: int) -> None:
    """Do as `torch.manual_seed`, which without CUDA keeps every caller's stack: 2 ms."""
    import torch

    if torch.backends.cuda.is_built():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def fresh_values(
    tensor: torch.Tensor, is_buffer: bool, generator: torch.Generator, kind: WeightKind
) -> torch.Tensor:
    """Return new values for a weight or buffer, of its shape and dtype, drawn where it is.

    Vectors get a zero, a tiny and a negative element; a matrix keeps its magnitude; buffers that
    were positive (a running variance) stay so; a counter at 0 becomes 7.

    Args:
        tensor: any shape and dtype; what is neither floating-point nor a counter stays as it is.
        is_buffer: it is a buffer of its module, no parameter.
        generator: of the tensor's device.
        kind: how to draw.
    """
    import torch

    old, where = tensor.detach(), tensor.device
    if is_buffer and kind not in ("trained", "nan") and is_choice(old):
        return _chosen_otherwise(old, generator)
    if not old.is_floating_point():
        is_counter = is_buffer and old.ndim == 0 and old.dtype == torch.int64 and int(old) == 0
        # One more than the large one is no float32.
        return torch.full_like(old, 2**24 + 8 if kind == "dyadic" else 7) if is_counter else old
    if kind == "nan":
        fresh = old.clone()  # statistics near what the next step will find
        if fresh.numel() and (is_buffer or fresh.ndim >= 2):
            fresh.view(-1)[fresh.numel() // (2 if is_buffer else 3)] = float("nan")
        return fresh
    if is_buffer and old.numel() and float(old.min()) > 0.0:
        return 0.5 + 1.5 * torch.rand(
            old.shape, generator=generator, dtype=old.dtype, device=where
        )
    if kind == "dyadic":
        whole = torch.randint(-16, 17, old.shape, generator=generator, device=where)
        return whole.to(old.dtype) / 16
    fresh = torch.randn(old.shape, generator=generator, dtype=old.dtype, device=where)
    if kind == "trained":
        return _as_trained(old, fresh, generator)
    if old.ndim >= 2:
        # A matrix keeps its magnitude, which was chosen for its fan-in.
        magnitude = float(old.double().square().mean().sqrt()) if old.numel() else 0.0
        fan_in = magnitude or old[0].numel() ** -0.5
        return fresh * (2.0 ** EXPONENTS[kind] if kind in EXPONENTS else fan_in)
    if old.ndim == 1 and old.numel() >= 4:
        zero, tiny, negative, _ = torch.randperm(old.numel(), generator=generator, device=where)[
            :4
        ].tolist()
        fresh[zero], fresh[tiny], fresh[negative] = 0.0, 1e-6, -fresh[negative].abs() - 0.1
    return fresh


def is_choice(buffer: torch.Tensor) -> bool:
    """Whether a buffer's elements choose: indices, or a mask of bools or of zeros and ones."""
    if buffer.ndim == 0 or buffer.numel() < 2 or buffer.is_complex():
        return False
    if not buffer.is_floating_point():
        return True
    return bool(((buffer == 0) | (buffer == 1)).all()) and bool(buffer.min() < buffer.max())


def _chosen_otherwise(old: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the rows of such a buffer in another order, so that each is legal; or its elements.

    Bools that are all alike would be the same in any order: a third of them become the other one.
    """
    import torch

    if old.dtype == torch.bool and bool((old == old.reshape(-1)[0]).all()):
        drawn = torch.rand(old.shape, generator=generator, device=old.device)
        return old ^ (drawn < 1 / 3)
    rows = old if len(old) > 1 else old.reshape(-1)
    order = torch.randperm(len(rows), generator=generator, device=old.device)
    return rows[order].reshape(old.shape)


def _as_trained(
    old: torch.Tensor, normal: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Return what `old` may have become by training; 1 % of its elements are times 10."""
    import torch

    if old.ndim >= 2:
        fresh = normal * float(old.double().square().mean().sqrt()) if old.numel() else old
    elif bool((old == 1).all()):
        fresh = 1 + 0.3 * normal
    elif bool((old == 0).all()):
        fresh = 0.3 * normal
    else:
        fresh = old.clone()
    drawn = torch.rand(old.shape, generator=generator, device=old.device)
    return torch.where(drawn < OUTLIER_SHARE, OUTLIER_FACTOR * fresh, fresh)


def draws_all(distribution: Distribution) -> bool:
    """Whether no floating-point number depends on what `get_inputs` gives."""
    return distribution in DRAWN


def redistributed(value: Any, distribution: Distribution, generator: torch.Generator) -> Any:
    """Return a floating-point tensor with other values of its shape and dtype, as asked.

    Args:
        value: anything; what is no floating-point tensor, or is empty, is returned as it is.
        distribution: what the values shall be.
        generator: of the tensor's device.
    """
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
        return value
    if distribution in UNCHANGED:
        return value
    if distribution == "offset":
        return value + 100.0
    if distribution == "far":
        return value + FAR_OFFSET
    if distribution == "tiny":
        return value * 2.0**-10
    if distribution == "sparse":
        drawn_at = torch.rand(value.shape, generator=generator, device=generator.device)
        return torch.where(drawn_at < SPARSE_SHARE, 0.0, value)

    def drawn(shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=value.dtype, device=generator.device)

    def powers_of_two(shape: Sequence[int], least: int, most: int) -> torch.Tensor:
        exponents = torch.randint(
            least, most + 1, shape, generator=generator, device=generator.device
        )
        return torch.exp2(exponents.to(value.dtype))

    if distribution == "few_values":
        few = torch.randint(-1, 2, value.shape, generator=generator, device=generator.device)
        more = torch.randint(-16, 17, value.shape, generator=generator, device=generator.device)
        few = torch.where(more % 3 == 0, more / 2, few).to(value.dtype)
        if few.ndim:
            few[len(few) // 2] = 0.0
        return few
    if distribution in ("late_rows", "like_rows", "whole_numbers", "half_range"):
        return _arranged(value, distribution, generator)
    if distribution == "normal":
        return drawn(value.shape)
    if distribution in EXPONENTS:
        return drawn(value.shape) * 2.0 ** EXPONENTS[distribution]
    if distribution == "heavy_tailed":
        factor = drawn(value.shape).mul_(HEAVY_TAIL_SIGMA).exp_()
        return drawn(value.shape).mul_(factor).clamp_(-HEAVY_TAIL_CLIP, HEAVY_TAIL_CLIP)
    if distribution in BITS:
        rows = [*value.shape[:1]] + [1] * (value.ndim - 1)
        shape = value.shape[-1:] if distribution == "wide_columns" else rows
        return drawn(value.shape).mul_(powers_of_two(shape, *BITS[distribution]))
    if distribution in ("dyadic", "constant_columns"):
        shape = value.shape if distribution == "dyadic" else value.shape[1:]
        few_bits = torch.randint(-8, 9, shape, generator=generator, device=generator.device)
        return (few_bits.to(value.dtype) / 4).expand(value.shape).contiguous()
    poisoned = value.clone()
    rows = poisoned.view(value.shape[0] if value.ndim else 1, -1)

    def below(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator, device=generator.device))

    at = below(len(rows))
    if distribution in ("nan_row", "negative_inf_row"):
        rows[at] = float("nan" if distribution == "nan_row" else "-inf")
    elif distribution == "nan_elements":
        for further, column in enumerate((0, rows.shape[1] - 1, below(rows.shape[1]))):
            rows[(at + further) % len(rows), column] = float("nan")
    elif distribution == "masked":
        width = rows.shape[1]
        rows[at, : max(1, 7 * width // 8)] = float("-inf")
        rows[(at + 1) % len(rows), width // 4 : 3 * width // 4] = float("-inf")
        rows[(at + 2) % len(rows), width // 2 :] = float("-inf")
    elif distribution == "filled":
        rows[at], rows[(at + 1) % len(rows)] = 0.0, -1e4
        rows[(at + 2) % len(rows), 0] = rows[(at + 2) % len(rows), -1] = 0.0
    elif distribution in EXTREMES:
        # bfloat16 holds it, too. In float64 it is that of float32: the oracle, which is float64
        # itself, has to have room for squares and differences.
        most = min(torch.finfo(value.dtype).max, torch.finfo(torch.float32).max)
        most *= EXTREMES[distribution]
        for row, sign in ((at, 1.0), ((at + 1) % len(rows), -1.0)):
            first = below(rows.shape[1])
            rows[row, first] = sign * most
            rows[row, (first + 1) % rows.shape[1]] = -sign * 0.8 * most
    else:  # one alone where there is one row
        rows[(at + 1) % len(rows), below(rows.shape[1])] = float("-inf")
        rows[at, below(rows.shape[1])] = float("inf")
    return poisoned


def _arranged(
    value: torch.Tensor, distribution: Distribution, generator: torch.Generator
) -> torch.Tensor:
    """Return rows whose place or likeness matters, or whole numbers; as `redistributed` does."""
    import torch

    where = generator.device
    if distribution == "whole_numbers":
        whole = torch.randint(0, 256, value.shape, generator=generator, device=where)
        whole.view(-1)[:1], whole.view(-1)[-1:] = 0, 255
        return whole.to(value.dtype)
    if distribution == "half_range":
        if not value.ndim:
            return value
        wide = value.clone(memory_format=torch.contiguous_format)
        wide.view(-1)[::13] *= HALF_FACTOR
        return wide
    if distribution == "late_rows":
        num_rows = len(value) if value.ndim else 1
        first = int(torch.randint(num_rows // 4, num_rows // 2 + 1, (), generator=generator,
                                  device=where))  # fmt: skip
        first = max(first, min(MOST_LOOKED_AT, num_rows - 1))
        ramp = torch.zeros(num_rows, dtype=value.dtype, device=value.device)
        ramp[first:] = torch.linspace(*LATE_OFFSETS, num_rows - first, device=value.device)
        return value + ramp.view(-1, *[1] * (value.ndim - 1)) if value.ndim else value
    width = value.shape[-1] if value.ndim else 1
    num_rows = value.numel() // width
    row = torch.randint(-8, 9, (width,), generator=generator, device=where) / 4
    keys = torch.rand((num_rows, width), generator=generator, device=where)
    rows = row[keys.argsort(-1)]
    ones = torch.nn.functional.one_hot(keys.argmax(-1), width).to(rows.dtype)
    kind = torch.arange(num_rows, device=where).view(-1, 1) % 3
    rows = torch.where(kind == 0, ones, torch.where((kind == 1) & (keys < 0.75), 0.0, rows))
    return rows.to(value.dtype).view(value.shape)


def widened(value: Any) -> Any:
    """Return a floating-point tensor in float64, anything else as it is."""
    import torch

    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.double()
    return value
