"""What could be gained: the captured graph, its traffic, the bound, PyTorch's own time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Reader, chromium
from command_line import tune
from made_runs import made_run, result, trials

from tuner.capture.capture import capture
from tuner.capture.outline import Given, Outline, outline_of
from tuner.command.terminal import print_nothing
from tuner.errors import StorageError
from tuner.machine.ceilings import bound_us
from tuner.machine.datasheets import known_device
from tuner.machine.device import describe
from tuner.planning.gaining import least_us, nothing
from tuner.problem.reference import load_problem
from tuner.review.gain import Gain, ModuleRecord, gain_lines, graph_lines
from tuner.review.report import parts_of, write_report
from tuner.review.run_data import RunData
from tuner.review.summary import format_summary, summary
from tuner.run import Run
from tuner.trial import to_json

TEXT = """
import torch
import torch.nn as nn, torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(40))
        self.unused = nn.Parameter(torch.ones(1000))

    def forward(self, x, y):
        return FORWARD


def get_inputs():
    return [torch.randn(30, 40), torch.randn(30, 40)]


def get_init_inputs():
    return []
"""
WHOLE = 4 * 30 * 40  # bytes
# A forward; bytes that must be read, bytes that must be written, operations at the least.
COSTS = {
    "each input once": ("x * x + y * x * self.w", 2 * WHOLE + 160, WHOLE, 4 * 1200),
    "what is not used": ("x + 1", WHOLE, WHOLE, 1200),
    "a part of an input": ("x + y[:, :1]", WHOLE + 120, WHOLE, 1200),
    "a value for each row": ("(x * y).sum(-1)", 2 * WHOLE, 120, 2400),
    "one output twice": ("(x.exp(),) * 2", WHOLE, WHOLE, 1200),
    "a view of an input": ("(x.view(40, 30), y.exp())", WHOLE, WHOLE, 1200),
    "a product": ("torch.relu(x @ y.T)", 2 * WHOLE, 3600, 2 * 900 * 40 + 900),
    "half of a product": ("torch.tril(x @ y.T)", 2 * WHOLE, 3600, 900 * 40 + 3 * 900),
    "rows of a product": ("(x @ y.T)[:10] + 1", 2 * WHOLE, 1200, 2 * 300 * 40 + 300),
    "a convolution": (
        "F.conv1d(x[None], y[:7, :30, None])",
        WHOLE + 840,
        1120,
        2 * 7 * 30 * 40,
    ),
}


def outline_from(folder: Path, forward: str) -> Outline:
    path = folder / "module.py"
    path.write_text(TEXT.replace("FORWARD", forward))
    return outline_of(capture(load_problem(path)))


@pytest.mark.parametrize("name", COSTS)
def test_traffic_and_arithmetic_are_what_no_kernel_avoids(name, tmp_path):
    forward, read, written, flops = COSTS[name]
    found = outline_from(tmp_path, forward)
    assert (found.read_bytes, found.written_bytes, found.flops) == (read, written, flops)


def test_a_graph_in_lines_has_its_steps_in_order_with_shapes_and_lines(tmp_path):
    outline = outline_from(tmp_path, "(x * self.w).mean(-1)")
    lines = graph_lines(outline)
    assert [" ".join(line.split()) for line in lines] == [
        "captured graph, in training mode:",
        "x input 30 x 40",
        "w parameter 40",
        "mul mul(x, w) 30 x 40 line 13",
        "mean mean(mul, axes=[1], keepdim=False) 30 line 13",
        "returns mean",
        f"task mean: one nest, 2 steps, nest-{outline.tasks[0].key[:6]}",
    ]


def test_the_bound_is_the_longer_one_of_traffic_and_arithmetic():
    h200 = known_device("H200")  # 4,800 GB/s and 67 TFLOPS by its datasheet
    assert bound_us(1.0, 4.8e9, h200, "fp32") == pytest.approx(1000.0)
    assert bound_us(67e9, 1.0, h200, "fp32") == pytest.approx(1000.0)
    assert bound_us(1.0, 1.0, describe("cpu"), "fp32") is None


def test_products_take_the_tensor_cores_that_their_accuracy_allows():
    h200 = known_device("H200")  # 989.4 TFLOPS of float16
    given = (Given("x", "input", (8, 8), "float32"),)
    products = Outline(given, (), (), (), 8, 8, 10**15 + 10**9, True, matrix_flops=10**15)
    third, one = 1e15 / (989.4 / 3) / 1e6, 1e15 / 989.4 / 1e6
    found = {kind: least_us(products, h200, kind) for kind in ("float32", "pytorch", "tf32")}
    assert found == {
        "float32": pytest.approx(third), "pytorch": pytest.approx(third),
        "tf32": pytest.approx(one),
    }  # fmt: skip
    images = replace(products, matrix_flops=0, convolution_flops=10**15)
    assert least_us(images, h200, "pytorch") == pytest.approx(one)  # which PyTorch rounds as well
    assert least_us(images, h200, "float32") == pytest.approx(third)
    short = replace(products, given=(Given("x", "input", (8, 8), "bfloat16"),))
    assert least_us(short, h200, "float32") == pytest.approx(one)
    moved = replace(products, read_bytes=48 * 10**12)  # 10 s of memory, beside 3 s of products
    assert least_us(moved, h200, "float32") == pytest.approx(1e7)


def test_what_could_be_gained_is_said_in_numbers():
    gain = Gain("NVIDIA H200", True, 3_000_000_000, 1_800_000_000, 10**9, 1000.0)
    assert gain.ratio is None and "PyTorch was not timed; the bound is 1.00 ms" in gain.words
    slow = replace(gain, eager_us=4000.0, copy_us=1100.0)
    assert slow.ratio == 4.0
    assert gain_lines(slow) == [
        "traffic: 4.80 GB (3.00 GB read, 1.80 GB written), each input, weight and output once",
        "arithmetic: at least 1,000,000,000 flop, one an element and step",
        "to gain: PyTorch takes 4.00 ms, a copy of as many bytes 1.10 ms; the bound is 1.00 ms, "
        "25 % of PyTorch's time: at most 4.00x to gain",
    ]
    made = replace(slow, flops=137_438_953_472 + 58_793_985, product_flops=137_438_953_472)
    assert gain_lines(made)[1] == (
        "arithmetic: at least 137,438,953,472 flop in products, two for each and its sum, and "
        "58,793,985 around, one an element and step"
    )
    unknown = replace(slow, bound_us=None)
    assert "the bound is not known: no datasheet's rates of NVIDIA H200" in unknown.words


def test_a_dry_run_of_a_module_shows_its_graph_and_what_could_be_gained(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(TEXT.replace("FORWARD", "(x * self.w).exp() + y"))
    said = tune("mine.py", "--dry-run", "--device", "cpu", cwd=tmp_path)
    assert said.code == 0, said.err
    for words in ("exp(mul)", "task add: one nest, 3 steps", "traffic: 14.6 kB", "nest: "):
        assert words in said.out, words
    assert "the bound is not known" in said.out and "PyTorch takes" in said.out
    said = tune("mine.py", "--dry-run", "--device", "cpu", "--json", cwd=tmp_path)
    data = json.loads(said.out)
    assert [step["name"] for step in data["graph"]["steps"]] == ["mul", "exp", "add"]
    assert data["gain"]["eager_us"] > 0 and data["gain"]["copy_us"] > 0
    assert data["gain"]["ratio"] is None and data["gain"]["is_nothing"] is False
    assert data["num_feasible_by_template"]["nest"] > 0
    assert Path(data["sources"]["nest"]).read_text().count("fused_mine_forward_rows") >= 1
    assert not (tmp_path / "runs").exists()


def test_a_graph_file_that_is_none_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(TEXT.replace("FORWARD", "x + y"))
    assert tune("mine.py", "--dry-run", "--device", "cpu", cwd=tmp_path).code == 0
    (config,) = (tmp_path / "cache").rglob("mine_forward.yaml")
    (graph,) = config.parent.rglob("graph.json")
    graph.write_text("{}")
    said = tune("--config", config, "--dry-run", "--device", "cpu", cwd=tmp_path)
    assert said.code == 2 and f"{graph}: not a graph" in said.err and "next: " in said.err


def test_within_5_percent_of_the_bound_or_of_a_copy_nothing_is_to_be_gained():
    gain = Gain("NVIDIA H200", True, 3_000_000_000, 1_800_000_000, 10**9, 1000.0, 1040.0, 900.0)
    assert gain.is_nothing
    assert not replace(gain, eager_us=1060.0).is_nothing
    assert replace(gain, eager_us=1140.0, copy_us=1100.0).is_nothing
    assert not replace(gain, eager_us=1160.0, copy_us=1100.0).is_nothing
    on_a_cpu = replace(gain, device="some CPU", bound_us=None, copy_us=2000.0)
    assert not on_a_cpu.is_nothing, "there a copy is no bound"


def test_nothing_to_gain_ends_before_the_search_with_numbers_and_exit_code_0(capsys):
    gain = Gain("NVIDIA H200", True, 3_000_000_000, 1_800_000_000, 10**9, 1000.0, 1040.0, 1030.0)
    error = nothing(gain)
    assert error.exit_code == 0 and "at most 1.04x to gain" in str(error)
    print_nothing(error)
    said = capsys.readouterr().out
    assert said.startswith("nothing to gain: PyTorch takes 1.04 ms") and "--force" in said
    print_nothing(error, is_json=True)
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "nothing to gain"
    assert (data["eager_us"], data["bound_us"], data["ratio"]) == (1040.0, 1000.0, 1.04)


@pytest.mark.parametrize("is_fallback", [True, False])
def test_a_run_says_how_far_from_the_bound_it_ended(is_fallback, tmp_path):
    gain = Gain("NVIDIA H200", True, 9_000_000, 3_000_000, 10**6, 1200.0, 3000.0, 1300.0)
    made = trials(30)
    ended = replace(result(made), is_fallback=is_fallback)
    run = made_run(tmp_path, made, ended)
    (run.path / "module.json").write_text(
        to_json(ModuleRecord(outline_from(tmp_path, "x + y"), gain))
    )
    reported = summary(run)
    assert reported.least.startswith("1.20 ms by the device's rates: PyTorch takes 2.50 times")
    assert reported.verdict.startswith("No faster kernel found") == is_fallback
    assert reported.least.endswith("2.50 times that, what was found 1.25 times") != is_fallback
    assert "\nleast     1.20 ms" in format_summary(reported)


def run_of_a_module(folder: Path, forward: str) -> Run:
    outline = outline_from(folder, forward)
    spoilt = replace(outline.steps[0], text="mul(x, <script>alert(1)</script>)")
    outline = replace(outline, steps=(spoilt, *outline.steps[1:]))
    gain = Gain("NVIDIA H200", True, 9_000_000, 3_000_000, 10**6, 1200.0, 3000.0, 1300.0)
    made = trials(12)
    run = made_run(folder, made, result(made))
    (run.path / "module.json").write_text(to_json(ModuleRecord(outline, gain)))
    return run


def test_the_report_shows_graph_tasks_times_and_bound(tmp_path):
    run = run_of_a_module(tmp_path, "(x * self.w).mean(-1)")
    shown = parts_of(RunData.of(run), ["module"])["module"]
    assert "<script" not in shown and "mul(x, &lt;script&gt;" in shown
    for words in (
        "mean(mul, axes=[1], keepdim=False)</code> (returned)", "<td>30 x 40</td>", "nest 1",
        "<td>PyTorch</td><td class=\"number\">3.00</td>",
        "<td>what was found</td><td class=\"number\">1.50</td>",
        "<td>the least by the device&#39;s rates, in the fastest units allowed</td>"
            "<td class=\"number\">1.20</td>",
        "<td>a copy of as many bytes</td><td class=\"number\">1.30</td>",
    ):  # fmt: skip
        assert words in shown, words
    assert "<dt>Least time</dt><dd>1.20 ms" in parts_of(RunData.of(run), ["verdict"])["verdict"]


def test_the_report_of_another_operator_has_no_module(tmp_path):
    made = trials(3)
    assert not parts_of(RunData.of(made_run(tmp_path, made)), ["module"])["module"].strip()


def test_a_browser_shows_the_module_on_a_phone_too(tmp_path):
    page = write_report(run_of_a_module(tmp_path, "(x * self.w).mean(-1)"))
    with chromium() as browser:
        reader = Reader(browser.new_context(viewport={"width": 360, "height": 700}), "file://")
        reader.page.goto(page.as_uri())
        reader.page.locator("#module").scroll_into_view_if_needed()
        assert reader.page.locator("[data-part=module] meter").count() == 4
        width = reader.page.evaluate("document.documentElement.scrollWidth")
        assert width <= 360 and not reader.complaints


def test_a_module_file_that_cannot_be_read_is_an_error(tmp_path):
    made = trials(3)
    run = made_run(tmp_path, made)
    (run.path / "module.json").write_text("[]")
    with pytest.raises(StorageError, match=r"module\.json: not what was written there"):
        summary(run)


def test_the_page_begins_with_the_graph_and_the_kernel_beside_each_piece(tmp_path):
    run = run_of_a_module(tmp_path, "torch.relu((x @ y.T).softmax(-1) * 2) @ y")
    found = parts_of(RunData.of(run), ["module"])["module"]
    pieces = [text.split("</figure>")[0] for text in found.split('<div class="piece">')[1:]]
    steps = [re.findall(r"<li><code>(\w+)\(", piece) for piece in pieces]
    assert [names[0] for names in steps[1:]] == ["matmul", "amax", "matmul"]
    assert {"mul", "relu"} <= set(steps[2])
    made = [re.search(r"<strong>(\d: [^<]*)</strong>", piece)[1] for piece in pieces]
    own = "PyTorch&#39;s own call"  # the first one is y.T
    assert made == [f"1: {own}", f"2: {own}", "3: a generated kernel", f"4: {own}"]
    assert "30 x 30, line 13" in pieces[1] and "read and written" in pieces[2]
    assert found.index('<figure class="graph"') < found.index("<meter")
