"""What a page says of kernels: names, bars, what a product's own kernels do, what bounds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_profiling import TASKS, of_module

from tuner.capture.outline import KernelTask, Step
from tuner.capture.tasks.convolutions import CONVOLUTION_TEMPLATE, ROUNDED_WGMMA_TEMPLATE
from tuner.capture.tasks.half_products import WGMMA_TEMPLATE
from tuner.machine.datasheets import known_device
from tuner.profiled import CountedCalls, Counters, KernelTime, Launch, Profiled, busy_us
from tuner.review.arithmetic import accuracy_words, eager_words, products_words
from tuner.review.counters import counter_words, counters_brief
from tuner.review.kernel_times import kernel_name, kernels_brief, kernels_view, launch_words
from tuner.review.kernel_work import makers_words, works_of, works_table
from tuner.review.report import parts_of
from tuner.review.run_data import UNITS, RunData
from tuner.review.sections import LEAST_BAR, _intervals
from tuner.review.workloads import AS_GIVEN, Workload
from tuner.trial import Interval

ADD = (
    "void at::native::elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
    "CUDAFunctor_add<float> >(at::TensorIteratorBase&, at::native::CUDAFunctor_add<float> const&)"
    "::{lambda(int)#1}>(int, at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<float>"
    " >(at::TensorIteratorBase&, at::native::CUDAFunctor_add<float> const&)::{lambda(int)#1})"
)
OF_NCU = (
    "void at::elementwise_kernel<128, 2, void at::gpu_kernel_impl_nocast<at::CUDAFunctor_add<"
    "float>>(at::TensorIteratorBase &, const T1 &)::[lambda(int) (instance 1)]>(int, T3)"
)
MUL = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::AUnaryFunctor<float, float, "
    "float, at::native::binary_internal::MulFunctor<float> >, std::array<char*, 2ul> >(int, x)"
)
EPILOGUE = "fused_mine_rows_behind_product_epilogue"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (ADD, "elementwise_kernel: CUDAFunctor_add"),
        (OF_NCU, "elementwise_kernel: CUDAFunctor_add"),
        (MUL, "vectorized_elementwise_kernel: MulFuncto…"),
        (f"void converted::product_kernel<false, {EPILOGUE}>(x, int)", "product_kernel"),
        ("void (anonymous namespace)::gemm<(int)128>(const float *)", "gemm"),
        ("void at::native::(anonymous namespace)::norm_kernel<float>(int, float)", "norm_kernel"),
        ("images::image_operands_kernel(images::Operands, images::Geometry)",
         "image_operands_kernel"),
        ("fused_mine_rows_kernel", "rows_kernel"),
        ("Memset (Device)", "Memset (Device)"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("s" * 60, "s" * 40 + "…"),
    ],
)  # fmt: skip
def test_a_kernels_name_is_shown_without_types_and_arguments(name, short):
    assert kernel_name(name, "mine") == short


def test_what_overlaps_counts_once():
    first, second = KernelTime("a", 10.0, 100.0), KernelTime("b", 60.0, 70.0)
    assert busy_us([second, first]) == 120.0
    assert busy_us([first, KernelTime("c", 20.0, 5.0), KernelTime("d", 200.0, 1.0)]) == 101.0
    assert busy_us([]) == 0.0


# As a product's kernel runs on an H100: the one behind it starts early, and waits.
FUSED = [
    KernelTime("converted::split_rows_kernel(converted::Split)", 0.0, 30.0),
    KernelTime(f"void converted::product_kernel<false, {EPILOGUE}>(x)", 30.0, 620.0),
    KernelTime(f"void converted::repair_kernel<{EPILOGUE}>(x)", 330.0, 330.0),
]
PRODUCT = [
    replace(TASKS[0], parameters=("product_n", "product_k")),
    KernelTask("nest", ("gelu",), "gelu", num_bytes=96_000_000, flops=67 * 10**7),
]


def fused(folder: Path, **changes: object) -> RunData:
    run_data = of_module(folder, FUSED, WGMMA_TEMPLATE, PRODUCT)
    return replace(run_data, **changes)


def test_pointwise_work_at_the_end_of_a_product_is_not_all_of_its_kernels(tmp_path):
    """Its name is in those of the product's kernels, as their epilogue's type."""
    works = works_of(fused(tmp_path))
    assert [(w.words, w.num_kernels, w.time_us) for w in works] == [
        ("1: linear, 2: gelu", 3, 660.0),  # 980 if what overlaps were counted twice
        ("all of the exported file's call", 3, 1000.0),
        ("all of PyTorch's call", 1, 2000.0),
    ]
    # Both tasks are all that the module does, so the bytes that it needs are theirs.
    assert works[0].gbps == pytest.approx(480e6 / 660 / 1e3)
    assert works[0].units == UNITS["fp16x3"] and works[2].units == UNITS["fp32"]
    assert works[0].of_arithmetic == pytest.approx(20.67e9 / 660 / 1e6 / (989.4 / 3))
    assert works[0].of_memory < 1 and works[0].of_arithmetic < 1


def test_the_graph_says_what_runs_each_task_in_the_winners_file(tmp_path):
    run_data = fused(tmp_path)
    assert makers_words(run_data) == ["the template's kernels", "at the end of 1's kernel"]
    page = parts_of(run_data, ["module"])["module"]
    assert "1: the template&#39;s kernels" in page and "PyTorch&#39;s own call" not in page
    apart = [*FUSED[:1], KernelTime("fused_mine_rows_kernel", 700.0, 50.0)]
    run_data = of_module(tmp_path / "apart", apart, WGMMA_TEMPLATE, PRODUCT)
    assert makers_words(run_data) == ["the template's kernels", "a generated kernel"]
    run_data = of_module(tmp_path / "theirs", apart, "nest_triton", PRODUCT)
    assert makers_words(run_data) == ["PyTorch's own call", "a generated kernel"]
    assert run_data.result is not None
    fallback = replace(run_data, result=replace(run_data.result, is_fallback=True))
    assert makers_words(fallback) == ["PyTorch's own operations"] * 2


@pytest.mark.parametrize(
    ("template", "parameters", "accuracy", "ours", "theirs"),
    [
        (WGMMA_TEMPLATE, ("product_n",), "float32", "fp16x3", "fp32"),
        (WGMMA_TEMPLATE, ("product_n",), "tf32", "fp16x3", "tf32"),
        (CONVOLUTION_TEMPLATE, ("image_pixels",), "pytorch", "fp16x3", "tf32"),
        (ROUNDED_WGMMA_TEMPLATE, ("image_part",), "pytorch", "fp16", "tf32"),
        ("nest_triton", ("image_part",), "pytorch", "tf32", "tf32"),
        ("nest_triton", (), "float32", "fp32", "fp32"),
    ],
)
def test_units_are_those_of_the_template_and_of_pytorchs_own_setting(
    template, parameters, accuracy, ours, theirs, tmp_path
):
    tasks = [replace(TASKS[0], parameters=parameters)]
    run_data = of_module(tmp_path, FUSED, template, tasks)
    environment = replace(run_data.environment, accuracy=accuracy)
    assert run_data.module is not None
    step = Step("conv", "conv2d(x, w)", (1, 1), "float32", 1)
    steps = (step,) if accuracy == "pytorch" else run_data.module.outline.steps
    outline = replace(run_data.module.outline, steps=steps)
    run_data = replace(
        run_data, environment=environment, module=replace(run_data.module, outline=outline)
    )
    assert (run_data.precision, run_data.baseline_precision) == (ours, theirs)
    # PyTorch's products of matrices are not in TF32 by themselves; its convolutions are.
    names = {bound.precision for bound in run_data.bounds()}
    assert ({"tf32", "fp16"} <= names) == (accuracy != "float32")
    assert len(run_data.shown_bounds()) <= 2


def test_the_least_time_holds_the_products_and_not_their_bytes_alone(tmp_path):
    """Of 3e10 operations: 61 us at two products' rate; traffic of 100 us is more."""
    run_data = fused(tmp_path)
    assert run_data.least_us == 100.0
    many = replace(run_data.environment, flops=3e12)
    run_data = replace(run_data, environment=many)
    assert run_data.least_us == pytest.approx(3e12 / (989.4 / 2) / 1e6)
    text = " ".join(parts_of(run_data, ["verdict"])["verdict"].split())
    assert "6.06 ms in the fastest units allowed: PyTorch takes" in text


def test_bars_keep_their_colours_and_show_what_overlaps(tmp_path):
    view = kernels_view(fused(tmp_path))
    assert view is not None and view["overlaps"]
    theirs, ours = ([span["name"] for span in bar["spans"]] for bar in view["bars"])
    assert (theirs, ours) == (
        ["cutlass"],
        ["split_rows_kernel", "product_kernel", "repair_kernel"],
    )
    spans = view["bars"][1]["spans"]
    assert [span["is_over"] for span in spans] == [False, False, True]
    # The longest of either call, as a share of that call, is shown of all others.
    colours = {row["name"]: row["colour"] for row in view["rows"]}
    assert colours == {
        "cutlass": 0, "product_kernel": 1, "repair_kernel": 2, "split_rows_kernel": 3,
    }  # fmt: skip
    assert view["between"] == [0.0, 340.0] and view["unit"] == "µs"
    assert view["rows"][1]["whole"] == FUSED[1].name
    page = parts_of(fused(tmp_path / "page"), ["why"])["why"]
    assert 'class="k2 over"' in page and "both times hold what they share" in page


def test_many_kernels_leave_one_colour_to_the_short_ones(tmp_path):
    many = [KernelTime(f"k{n}", 10.0 * n, 20.0 - n) for n in range(15)]
    view = kernels_view(of_module(tmp_path, many))
    assert view is not None
    colours = [row["colour"] for row in view["rows"]]  # behind `cutlass`, which is the longest
    assert colours[:15] == [1, 2, 3, 4, 5, 6, *[7] * 9] and colours[15] == 0


def test_two_kernels_that_are_called_alike_are_distinguished(tmp_path):
    twice = [KernelTime(f"void a::k<{n}>(int)", 10.0 * n, 5.0) for n in range(2)]
    view = kernels_view(of_module(tmp_path, twice))
    assert view is not None and [row["name"] for row in view["rows"]][:2] == ["k", "k, 2"]


def test_the_verdict_says_how_many_kernels_became_how_many(tmp_path):
    run_data = fused(tmp_path)
    assert kernels_brief(run_data) == (
        "PyTorch's call is 1 kernel, 2.00 ms in all, the longest cutlass with 2.00 ms; the "
        "exported file's call is 3 kernels, 1.00 ms in all, the longest product_kernel with "
        "620 µs (one profiled call of each; latencies are medians of the race)"
    )
    page = parts_of(run_data, ["verdict"])["verdict"].replace("&#39;", "'")
    assert "<strong>Kernels:</strong> PyTorch's call is 1 kernel" in page
    assert run_data.profiles is not None
    none = replace(run_data.profiles, winner=Profiled(2, 0.0, ()))
    assert kernels_brief(replace(run_data, profiles=none)).endswith(
        "the exported file's call is 0 kernels, 0 µs in all (one profiled call of each; "
        "latencies are medians of the race)"
    )
    on_cpu = replace(run_data.profiles, is_gpu=False)
    assert kernels_brief(replace(run_data, profiles=on_cpu)) == ""


def test_a_kernel_that_ran_has_no_occupancy_of_0():
    """PyTorch's profiler gives 0 where more shared memory is asked for than is usual."""
    launch = Launch(132, 384, 168, 197_664, 0.0)
    words = "132 x 384 threads, 168 registers, 197,664 bytes of shared memory"
    h100 = known_device("NVIDIA H100")
    assert launch_words(launch, h100) == f"{words}, occupancy at most 19 %"
    assert launch_words(replace(launch, occupancy=0.13), h100) == f"{words}, occupancy 13 %"
    assert launch_words(replace(launch, occupancy=None), None) == words


# ---- counters -------------------------------------------------------------------------------

PRODUCT_COUNTED = Counters(
    f"void product_kernel<0, {EPILOGUE}>(TensorMaps, int)",
    640.0, 0.72, 0.18, 0.33, 0.14, 391e6, 1662.4, {"gmma": 1.3},
)  # fmt: skip
SPLIT_COUNTED = Counters(
    "split_rows_kernel(Split)", 34.0, 0.0, 0.75, 0.28, 0.89, 86e6, 1989.9, {"barrier": 7.0}
)
CALLS = CountedCalls((SPLIT_COUNTED,), (SPLIT_COUNTED, PRODUCT_COUNTED))


def test_a_clock_below_the_others_is_reported_as_power():
    assert counter_words(CALLS, "mine") == [
        "product_kernel (95 % of the kernels' time): the tensor cores are busy, in 72 % of the "
        "cycles, at a clock of 1,662 MHz, as a power limit makes it (other kernels of the two "
        "calls reach 1,990); only less arithmetic, or a cheaper precision, helps.",
        "split_rows_kernel (5 % of the kernels' time): the memory is busy, at 75 % of its rate; "
        "fewer bytes help: fuse what reads them again, or store them in fewer bits.",
    ]
    steady = replace(PRODUCT_COUNTED, clock_mhz=1950.0)
    assert "power" not in counter_words(CountedCalls((), (SPLIT_COUNTED, steady)))[0]


def test_the_verdicts_bound_has_what_the_counters_say_of_the_longest_kernel(tmp_path):
    assert counters_brief(CALLS) == (
        "By the GPU's counters, in product_kernel (95 % of the kernels' time) the tensor cores "
        "are busy, in 72 % of the cycles, at a clock of 1,662 MHz, as a power limit makes it "
        "(other kernels of the two calls reach 1,990)"
    )
    after = counters_brief(CALLS, follows=True)
    assert after == f"{counters_brief(CALLS)}: less of their rate, which is at full clock"
    page = parts_of(fused(tmp_path, counters=CALLS), ["verdict"])["verdict"]
    assert ". By the GPU&#39;s counters, in product_kernel" in page
    idle = replace(PRODUCT_COUNTED, tensor=0.2, clock_mhz=None)
    assert "no unit is busy, most issue, in 33 % of the cycles" in counters_brief(
        CountedCalls((), (idle,))
    )
    unknown = replace(idle, tensor=None, memory=None, issue=None)
    assert counters_brief(CountedCalls((), (unknown,))) == ""
    assert counters_brief(CountedCalls((), ())) == ""


def test_a_roof_that_is_near_says_how_much_is_left(tmp_path):
    """2e11 operations in the 1,500 us of the race: 133 TFLOPS of 330, so 40 %; 3e11 are 61 %."""
    for flops, words in ((2e11, "far from it"), (3e11, "at most 1.649x is left without less")):
        run_data = fused(tmp_path / words[:3])
        run_data = replace(run_data, environment=replace(run_data.environment, flops=flops))
        page = " ".join(parts_of(run_data, ["verdict"])["verdict"].split())
        assert words in page, page[:3000]
    assert works_table([]) is None


# ---- arithmetic -----------------------------------------------------------------------------


def test_the_page_says_what_eager_and_the_file_compute_in(tmp_path):
    """The baseline without TF32; products of three, whose least time is more than the allowed."""
    run_data = fused(tmp_path)
    environment = replace(run_data.environment, flops=3e12)
    run_data = replace(run_data, environment=replace(environment, accuracy="pytorch"))
    parts = parts_of(run_data, ["head", "verdict"])
    head, page = (" ".join(text.replace("&#39;", "'").split()) for text in parts.values())
    assert "accuracy class pytorch (error at most twice PyTorch's own)" in head
    assert "against PyTorch eager (float32, TF32 off in matmul, on in cuDNN)" in head
    said = "each float32 product is made of three of float16, as exact as float32"
    assert products_words(run_data) == said and f"<strong>Products:</strong> {said}" in page
    assert "6.06 ms in the fastest units allowed: PyTorch takes 0.49 times that, " in page
    assert "9.10 ms in the units it uses: 0.16 times" in page
    assert run_data.result is not None
    own = replace(run_data, result=replace(run_data.result, is_fallback=True))
    assert products_words(own) == ""  # the file makes none of its own
    assert run_data.device is not None
    on_cpu = replace(environment, device={**environment.device, "kind": "cpu"})
    assert eager_words(replace(run_data, environment=on_cpu)) == "float32"
    unknown = replace(environment, accuracy="")
    assert accuracy_words(replace(run_data, environment=unknown)) == "unknown"


def test_the_bar_of_a_narrow_interval_is_wider_than_its_mark_and_around_it(tmp_path):
    narrow = Workload(AS_GIVEN, Interval(4.0, 3.999, 4.001, 0.95, 3))
    wide = Workload("in a step of training", Interval(3.0, 2.5, 3.5, 0.95, 3))
    first, second = _intervals([narrow, wide])
    assert first["width"] == pytest.approx(LEAST_BAR, abs=0.02)
    assert first["left"] + first["width"] / 2 == pytest.approx(first["at"], abs=0.02)
    assert second["left"] + second["width"] / 2 == pytest.approx(second["at"], abs=0.02)
    assert second["width"] == pytest.approx(100 / (1.08 * 3.001), abs=0.02)
