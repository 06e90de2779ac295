"""Emulate precision strategies of Gemm + Scale + BatchNorm on the checker's own probes.

    python -m benchmarks.precision                              #33, every value probe: 2 minutes
    python -m benchmarks.precision --sizes batch=2048,in_features=4096,out_features=4096
    python -m benchmarks.precision --probe heavy_tailed --strategy fp16_fp8x2 --strategy fp16x3
    python -m benchmarks.precision --integers                   #what class float32 makes of 8 bits

Operands are rounded as a template would round them; their products are summed in float64, and in
the last table as Hopper's tensor cores sum. An error's *use* is |error| / (atol + rtol |value|) of
the normalised output; a strategy passes where no use is above 1. Only the `--columns` columns with
the largest |gamma| are computed, since errors grow with it: maxima are nearly those of all
columns, and shares (counted elements of all elements) are lower bounds. One core, no GPU; prints
Markdown.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.rounding import bf16, fp16, part, scale_of, summed
from benchmarks.shapes import sizes_of
from tuner.check.probes.batches import Extent
from tuner.check.probes.probe import Probe
from tuner.check.probes.probes import screening_probes, thorough_probes
from tuner.check.produce import OWN_WEIGHTS_SEED
from tuner.kernel.family import load_family
from tuner.problem.reference import Problem, load_problem

RTOL = ATOL = 1e-4
SUM_ROWS = 64  # rows whose sums are emulated: the longest
WEIGHT_LIMIT = 1.25  # of an element, see Case; as given 1.09 are reached
EXPECTED_LIMIT = 0.15 * ATOL  # rms: 6.7 times it is atol; of 2^26 elements one is at 5.5 times
# Of fp16_int8x2's guard, wgmma_guard.cuh: what it allows, of the error of a float32 product; that
# error, over the sizes of both rows; what sums lose for each element of k between promotions.
FLOAT32_SHARE = 1.75
FLOAT32_ERROR = 0.196 * 2.0**-23
CUT_OFF = 1.75e-9
EDGES = (0.0, 1.0, 1.25, 1.5, 2.0, 3.0, float("inf"))  # of weights

# ---- strategies -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Strategy:
    """Products of parts of x and of W, small ones first.

    Attributes:
        work: tensor-core work; a float16 product is 1, an 8-bit one 1/2.
        products: (part of x, part of W).
        again_rows, again_weight, again_error: what is computed again with three float16
            products: rows longer than `again_rows` rms lengths, and columns where a shorter row
            weighs more than `again_weight` (`Case.weights`); without `again_rows`, everything if
            any element does, or if its expected error (`Case.expected_errors`) is above
            `again_error`. The share that is computed again, times 3, is added to the work.
    """

    name: str
    work: float
    products: tuple[tuple[str, str], ...]
    scaled_by: str = "row"
    again_rows: float = float("inf")
    again_weight: float = float("inf")
    again_error: float = float("inf")


MAIN = ("fp16", "fp16")
FP8X2 = (("e4m3", "e4m3 rest"), ("e4m3 rest", "e4m3"), MAIN)
INT8X2 = (("int8", "int8 rest"), ("int8 rest", "int8"), MAIN)
FP16X3 = (("fp16 rest", "fp16"), ("fp16", "fp16 rest"), MAIN)
STRATEGIES = (
    Strategy("fp16", 1.0, (MAIN,)),
    Strategy("fp16_fp8x2", 2.0, FP8X2),
    Strategy("fp16_fp8x2, one exponent a matrix", 2.0, FP8X2, "matrix"),
    Strategy("fp16_fp8x2, an exponent a row and 64 of k", 2.0, FP8X2, "stage"),
    Strategy(
        "fp16 + 2 e5m2", 2.0, (("e5m2", "e5m2 rest"), ("e5m2 rest", "e5m2"), MAIN)
    ),
    Strategy("fp16 + 2 int8", 2.0, INT8X2),
    Strategy(
        "fp16 + 3 e4m3 (W in two pieces)", 2.5,
        (("e4m3", "e4m3 rest"), ("e4m3 rest", "e4m3 twice"), MAIN),
    ),
    Strategy(
        "fp16 + fp16 (rest of x) + e4m3", 2.5,
        (("e4m3", "e4m3 rest"), ("fp16 rest", "fp16"), MAIN),
    ),
    Strategy(
        "fp16 + 4 e4m3 (both in two pieces)", 3.0,
        (("e4m3 twice", "e4m3 rest"), ("e4m3 rest", "e4m3 twice"), MAIN),
    ),
    Strategy("bf16x3", 3.0, (("bf16 rest", "bf16"), ("bf16", "bf16 rest"), ("bf16", "bf16"))),
    Strategy("fp16x3", 3.0, FP16X3),
    Strategy("fp16_fp8x2, rows over 2 again", 2.0, FP8X2, again_rows=2.0),
    Strategy("fp16_fp8x2, rows over 1.25 again", 2.0, FP8X2, again_rows=1.25),
    Strategy(
        "fp16_fp8x2, rows over 1.25 and columns over 1.5 again", 2.0, FP8X2, again_rows=1.25,
        again_weight=1.5,
    ),
    Strategy("fp16_fp8x2, or all again", 2.0, FP8X2, again_weight=WEIGHT_LIMIT),
    Strategy("fp16 + 2 int8, or all again", 2.0, INT8X2, again_error=EXPECTED_LIMIT),
)  # fmt: skip
# Of the last table: products, their order, and whether sums are promoted.
ARRANGEMENTS: Mapping[str, tuple[tuple[tuple[str, str], ...], str, bool]] = {
    "fp16_fp8x2, sweeps": (FP8X2, "sweeps", False),
    "fp16_fp8x2, fused, promoted": (FP8X2, "fused", True),
    "fp16x3, sweeps": (FP16X3, "sweeps", False),
    "fp16x3, fused, promoted": (FP16X3, "fused", True),
}


def lengths_of(values: torch.Tensor, strategy: Strategy) -> list[torch.Tensor]:
    """Return the lengths of rows, of what float16 leaves, of what 8 bits leave of either."""
    (whole, rest), *_ = strategy.products
    scale = scale_of(values, strategy.scaled_by)
    v = values * scale
    left = v - fp16(v)
    kept = (v, left, v - part(whole, v), left - part(rest, v))
    return [(n / scale).double().square().sum(1).sqrt() for n in kept]


@dataclass
class Case:
    """One probe: its operands, and the exact answer for some of the columns.

    Attributes:
        x, weight: float32 [batch, k] (centred as `centre` does) and [columns, k].
        h, y: float64 [batch, columns], the product and the normalised output.
        slope, beta: y = slope (h - mean(h)) + beta.
        lengths: of the rows of x, over their rms.
        weights: how much errors of an element matter, [batch, columns]: |slope| |row of x|
            |row of W| / sqrt(k). It is |gamma| times the row's length where x is isotropic.
        all_gammas: of the columns that are left out as well.
    """

    name: str
    x: torch.Tensor
    weight: torch.Tensor
    gamma: torch.Tensor
    scale: torch.Tensor
    beta: torch.Tensor
    eps: float
    all_gammas: torch.Tensor
    computed: dict[Any, torch.Tensor] = field(default_factory=dict)

    @property
    def num_elements(self) -> int:
        """Return the size of the whole output, all columns."""
        return len(self.x) * len(self.all_gammas)

    def __post_init__(self) -> None:
        x, w = self.x.double(), self.weight.double()
        self.h = x @ w.T
        self.y, self.slope = self.normalised(self.h)
        rows = x.square().sum(1).sqrt()
        self.lengths = rows / rows.square().mean().sqrt()
        columns = self.slope.abs() * w.square().sum(1).sqrt()
        self.weights = torch.outer(rows, columns) / x.shape[1] ** 0.5

    def normalised(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return y [batch, columns] and the slopes of its columns, from h and its statistics."""
        scale = self.scale.double()
        var = h.var(0, unbiased=False)
        slope = self.gamma.double() * scale / (scale.square() * var + self.eps).sqrt()
        return (h - h.mean(0)) * slope + self.beta.double(), slope

    def use(self, y: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        """Return each element's error over what the class allows it."""
        return (y - exact).abs() / (ATOL + RTOL * exact.abs())

    def product(self, strategy: Strategy) -> torch.Tensor:
        """Return h as the strategy computes it, its products summed in float64."""
        key = (strategy.products, strategy.scaled_by)
        if key not in self.computed:
            x_scale = scale_of(self.x, strategy.scaled_by)
            w_scale = scale_of(self.weight, strategy.scaled_by)
            h = torch.zeros_like(self.h)
            for x_part, w_part in strategy.products:
                left = part(x_part, self.x * x_scale).double() / x_scale
                right = part(w_part, self.weight * w_scale).double() / w_scale
                h += left @ right.T
            self.computed[key] = h
        return self.computed[key]

    def expected_errors(self, strategy: Strategy) -> torch.Tensor:
        """Return the rms error that the corrections' rounding lets expect of each element of y.

        From what a kernel can know after its first pass: norms of the rows of x and of W (the
        values, what float16 left of them, what 8 bits left of either) and the slopes. Roundings
        are taken as independent, so a sum of products of two rows is their norms' product over
        sqrt(k).
        """
        x, x_left, x_off, x_left_off = lengths_of(self.x, strategy)
        w, w_left, w_off, w_left_off = lengths_of(self.weight, strategy)
        square = torch.zeros_like(self.h)
        for a, b in ((x_off, w_left), (x, w_left_off), (x_left_off, w), (x_left, w_off)):
            square += torch.outer(a, b).square() / self.x.shape[1]
        return square.sqrt() * self.slope.abs()

    def answer(self, strategy: Strategy) -> tuple[torch.Tensor, float]:
        """Return y with the strategy's own statistics, and the strategy's work here."""
        h = self.product(strategy)
        y, slope = self.normalised(h)
        three = replace(strategy, products=FP16X3)
        if strategy.again_rows == float("inf"):
            is_coarse = float(self.weights.max()) > strategy.again_weight or (
                strategy.again_error < float("inf")
                and float(self.expected_errors(strategy).max()) > strategy.again_error
            )
            if not is_coarse:
                return y, strategy.work
            return self.normalised(self.product(three))[0], strategy.work + 3.0
        exact = self.product(three)
        is_long = self.lengths > strategy.again_rows
        is_heavy = self.weights[~is_long].amax(0) > strategy.again_weight
        is_again = is_long[:, None] | is_heavy[None, :]
        redone = (exact - h.mean(0)) * slope + self.beta.double()
        share = float(is_long.double().mean())
        longest = float(self.lengths[~is_long].max())
        heavy = self.all_gammas.abs() * longest > strategy.again_weight  # of all columns, about
        work = strategy.work + 3.0 * (share + (1.0 - share) * float(heavy.double().mean()))
        return torch.where(is_again, redone, y), work


def centre_of(x: torch.Tensor) -> torch.Tensor:
    """Return the mean of at most 64 evenly spread rows in bfloat16, as wgmma_operands.cuh does."""
    count = min(64, len(x))
    stride = len(x) // count
    return bf16(x[: count * stride : stride].mean(0))


# ---- probes ---------------------------------------------------------------------------------

FINITE = ("as_given", "offset", "heavy_tailed", "normal", "wide_range", "wide_columns", "tiny")


def value_probes(num_rows: int | None, seed: int = 0) -> list[Probe]:
    """Return the checker's probes that differ in values or in rows, each kind once."""
    found: dict[tuple[Any, ...], Probe] = {}
    for probe in [*thorough_probes(seed, num_rows), *screening_probes(seed, Extent(num_rows))]:
        is_plain = probe.mode == "train" and probe.layout in ("contiguous", "misaligned")
        is_usual = probe.weights in ("own", "random") and probe.batch not in (0, 1, 2)
        if is_plain and is_usual and not probe.gradients and probe.distribution in FINITE:
            own = probe.weights == "own"
            found.setdefault((probe.distribution, probe.batch, own), probe)
    return list(found.values())


def case_of(problem: Problem, probe: Probe, num_columns: int, models: dict[str, Any]) -> Case:
    """Return one probe's case; `models` keeps what takes long to draw."""
    key = f"{probe.weights} {probe.seed_weights}" if probe.weights == "random" else "own"
    if key not in models:
        models.clear()
        model = problem.make_model(OWN_WEIGHTS_SEED)
        models[key] = problem.randomise(model, probe.seed_weights) if key != "own" else model
    state = {name: value.detach() for name, value in models[key].state_dict().items()}
    (x,) = problem.make_inputs(
        probe.seed_inputs, distribution=probe.distribution, batch=probe.batch
    )
    order = state["bn.weight"].abs().argsort(descending=True, stable=True)[:num_columns]
    return Case(
        f"{probe.name} ({len(x)} rows)",
        x - centre_of(x),
        weight=state["gemm.weight"][order],
        gamma=state["bn.weight"][order],
        scale=state["scale"][order],
        beta=state["bn.bias"][order],
        eps=models[key].bn.eps,
        all_gammas=state["bn.weight"],
    )


# ---- tables ---------------------------------------------------------------------------------


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def cell(use: torch.Tensor, num_elements: int) -> str:
    """Return the largest use, and the share of all elements above 1 where there are some."""
    count = int((use > 1.0).sum())
    largest = float(use.max())
    text = f"{largest:.2f}" if largest < 100 else f"{largest:.0f}"
    return f"**{text}** ({100.0 * count / num_elements:.2g} %)" if count else text


def strategy_cells(case: Case, strategies: Sequence[Strategy]) -> dict[str, tuple[str, float]]:
    """Return each strategy's cell, and its work, on one probe."""
    cells = {}
    for strategy in strategies:
        y, work = case.answer(strategy)
        cells[strategy.name] = (cell(case.use(y, case.y), case.num_elements), work)
    return cells


def facts_of(case: Case) -> list[str]:
    """Return how rows and columns of one probe spread, and what that does to fp16_fp8x2."""
    h = case.product(next(s for s in STRATEGIES if s.name == "fp16_fp8x2"))
    y, _ = case.normalised(h)
    use = case.use(y, case.y)
    bad = (use > 1.0).any(1)
    middle, top = (float(case.lengths.quantile(q)) for q in (0.5, 0.99))
    shift = ((h - case.h).mean(0) * case.slope).abs().max()
    var = (h.var(0) / case.h.var(0) - 1.0).abs().max()
    bins = []
    for low, high in itertools.pairwise(EDGES):
        inside = (case.weights >= low) & (case.weights < high)
        bins.append(f"{float(use[inside].max()):.2f}" if bool(inside.any()) else "")
    return [
        f"{middle:.2f}, {top:.2f}, {float(case.lengths.max()):.2f}",
        f"{100 * float((case.lengths > 1.25).double().mean()):.1f} %",
        f"{float(case.gamma.abs().max()):.2f}, {float(case.weights.max()):.2f}",
        f"{int(bad.sum())}: from {float(case.lengths[bad].min()):.2f}" if bool(bad.any()) else "0",
        f"{float(shift):.0e}, {float(var):.0e}",
        *bins,
    ]


def sum_cells(case: Case) -> list[str]:
    """Return the rms error and largest use of each arrangement of sums, on the longest rows."""
    rows = case.lengths.argsort(descending=True)[:SUM_ROWS]
    mean = case.h.mean(0)
    cells = []
    for products, order, promotes in ARRANGEMENTS.values():
        h = summed(case.x[rows], case.weight, products, order=order, promotes=promotes)
        y = (h - mean) * case.slope + case.beta.double()
        error = (y - case.y[rows]) / case.gamma.abs().clamp_min(1e-30)
        rms = float(error.square().mean().sqrt() / case.lengths[rows].square().mean().sqrt())
        use = case.use(y, case.y[rows])
        cells.append(f"{rms:.1e}, {cell(use, case.num_elements)}")
    return cells


def report(
    problem: Problem, probes: Sequence[Probe], strategies: Sequence[Strategy], num_columns: int
) -> str:
    """Return the three tables."""
    uses: dict[str, dict[str, tuple[str, float]]] = {}
    facts, sums = [], []
    models: dict[str, Any] = {}
    for probe in sorted(probes, key=lambda p: p.weights):
        case = case_of(problem, probe, num_columns, models)
        uses[case.name] = strategy_cells(case, strategies)
        facts.append([case.name, *facts_of(case)])
        sums.append([case.name, *sum_cells(case)])
    lines = []
    for strategy in strategies:
        works = [cells[strategy.name][1] for cells in uses.values()]
        low, high = min(works), max(works)
        work = f"{low:.3g}" if high - low < 0.005 else f"{low:.3g} to {high:.3g}"
        lines.append([strategy.name, work, *(c[strategy.name][0] for c in uses.values())])
    edges = [f"use at weight {low:g} to {high:g}" for low, high in itertools.pairwise(EDGES)]
    fact_head = [
        "probe", "row lengths: median, 99 %, largest", "rows over 1.25",
        "largest abs(gamma), weight", "fp16_fp8x2: rows that fail",
        "moves mean (of y), variance (relative)", *edges,
    ]  # fmt: skip
    return "\n\n".join(
        [
            table(["strategy", "work", *uses], lines),
            table(fact_head, facts),
            table(["probe: rms error at weight 1, use", *ARRANGEMENTS], sums),
        ]
    )


# ---- integers, for class float32 ------------------------------------------------------------

INTEGER_INPUTS: Mapping[str, Callable[[int, int], torch.Tensor]] = {
    "uniform in 0 to 1, as given": torch.rand,
    "uniform in -0.5 to 0.5": lambda rows, k: torch.rand(rows, k) - 0.5,
    "normal": torch.randn,
    "normal + 1": lambda rows, k: torch.randn(rows, k) + 1.0,
    "the positive part of a normal": lambda rows, k: torch.randn(rows, k).relu(),
}
INTEGER_WEIGHTS: Mapping[str, Callable[[int, int], torch.Tensor]] = {
    "uniform, as nn.Linear's": lambda columns, k: (2.0 * torch.rand(columns, k) - 1.0) / k**0.5,
    "normal": torch.randn,
}
INTEGER_LENGTHS = (1024, 2048, 4096, 8192, 16384)


def share_of_float32(
    x: torch.Tensor, weight: torch.Tensor, scaled_by: str, promote_k: int = 1024
) -> float:
    """Return the error to expect of `fp16_int8x2` over what its guard allows; above 1 it refuses.

    Args:
        x: [batch, k], not centred.
        weight: [columns, k].
        scaled_by: "filled" or "guessed" (`prepare: behind`), see `scale_of`.
        promote_k: elements of k between promotions.
    """
    root = x.shape[1] ** 0.5
    strategy = Strategy("fp16_int8x2", 2.0, INT8X2, scaled_by)

    def largest(values: torch.Tensor, given: torch.Tensor) -> list[float]:
        sizes = given.double().abs().sum(1) / root
        return [float((lengths / sizes).max()) for lengths in lengths_of(values, strategy)]

    x_length, x_left, x_off, x_left_off = largest(x - centre_of(x), x)
    _, w_left, w_off, w_left_off = largest(weight, weight)
    cut_off = x_length * CUT_OFF * min(promote_k, x.shape[1])
    squares = (x_off * w_left, x_left * w_off, x_left_off, x_length * w_left_off, cut_off)
    expected = sum(each**2 for each in squares) ** 0.5
    return float(expected / (FLOAT32_SHARE * FLOAT32_ERROR * root))


def integers_report(num_rows: int, num_columns: int, seed: int) -> str:
    """Return a table of `share_of_float32`, by operands and lengths of rows."""
    lines = []
    for (x_name, draw_x), (w_name, draw_w) in itertools.product(
        INTEGER_INPUTS.items(), INTEGER_WEIGHTS.items()
    ):
        cells = []
        for k in INTEGER_LENGTHS:
            torch.manual_seed(seed)
            x, weight = draw_x(num_rows, k), draw_w(num_columns, k)
            shares = [share_of_float32(x, weight, by) for by in ("filled", "guessed")]
            cells.append("; ".join(f"**{s:.2f}**" if s > 1.0 else f"{s:.2f}" for s in shares))
        lines.append([x_name, w_name, *cells])
    return table(["x", "W", *(f"k = {k}" for k in INTEGER_LENGTHS)], lines)


def main() -> None:
    """Parse the command line and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--sizes", type=sizes_of, default="", help="name=number,...; those of #33 otherwise"
    )
    parser.add_argument("--probe", action="append", help="a distribution; all otherwise")
    parser.add_argument("--strategy", action="append", choices=[s.name for s in STRATEGIES])
    parser.add_argument("--columns", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--integers", action="store_true", help="of fp16_int8x2's guard alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.integers:
        print(integers_report(1024, options.columns, options.seed))
        return
    problem = load_problem(load_family("gemm_scale_batchnorm").reference, options.sizes)
    probes = value_probes(problem.num_rows(), options.seed)
    chosen = [p for p in probes if not options.probe or p.distribution in options.probe]
    names = options.strategy or [s.name for s in STRATEGIES]
    strategies = [s for s in STRATEGIES if s.name in names]
    print(report(problem, chosen, strategies, options.columns))


if __name__ == "__main__":
    main()
