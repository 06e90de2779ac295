"""Long names of modules and kernels push nothing out of a page, on a screen and on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from browser import Reader, chromium
from made_runs import made_run, raced_result, trials
from test_dashboard import serving
from test_kernel_times import ADD, CALLS, FUSED, PRODUCT
from test_profiling import of_module

from tuner.capture.tasks.half_products import WGMMA_TEMPLATE
from tuner.profiled import COUNTERS_NAME, PROFILE_NAME, KernelTime
from tuner.review.report import write_report
from tuner.review.run_data import RunData
from tuner.trial import to_json

TITLE = "m_34_convtranspose3d_layernorm_gelu_scaling_forward"
SIZES = {
    "batch": 32, "x_size_1": 32, "x_size_2": 16, "conv_transpose_weight_size_0": 32,
    "conv_transpose_weight_size_1": 64, "conv_transpose_weight_size_2": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


def measured(page: Any, selector: str) -> tuple[int, int]:
    """Return how wide the content of an element is, and the element itself."""
    found = page.eval_on_selector(selector, "e => [e.scrollWidth, e.clientWidth]")
    return found[0], found[1]


@pytest.mark.parametrize("width", [390, 1440])
def test_the_list_holds_runs_of_long_names_whole(browser, width, tmp_path, request):
    made = trials(5)
    facts = {"title": TITLE, "op": TITLE, "sizes": SIZES, "device": {"name": "NVIDIA H100 80GB"}}
    run = made_run(tmp_path / "runs", made, raced_result(made, 2.0), environment=facts)
    run.path.rename(run.path.with_name(f"20261126-092526-{TITLE}-nvidia-h100-80gb"))
    server = serving(tmp_path / "runs")
    request.addfinalizer(server.end)
    context = browser.new_context(viewport={"width": width, "height": 800})
    reader = Reader(context, server.url)
    reader.page.goto(f"{server.url}/?token={server.token}")
    reader.page.wait_for_selector("#shown:has-text('1 of 1')")
    assert reader.page.locator("#runs tbody a").text_content() == TITLE
    for selector in ("html", ".scroll"):
        content, whole = measured(reader.page, selector)
        assert content <= whole
    assert reader.complaints == []
    context.close()


@pytest.mark.parametrize("width", [390, 1440])
def test_a_report_holds_kernels_of_long_names(browser, width, tmp_path):
    kernels = [*FUSED, KernelTime("sm80_xmma_gemm_f32f32_" + 9 * "tilesize64x256x8_", 700.0, 9.0)]
    run_data = of_module(tmp_path, kernels, WGMMA_TEMPLATE, PRODUCT)
    long = replace(CALLS.winner[1], name="void " + 20 * "very_long_kernel_" + "<int>(int)")
    counters = replace(CALLS, winner=(*CALLS.winner, long))
    (run_data.run.path / COUNTERS_NAME).write_text(to_json(counters))
    profiles = run_data.profiles
    assert profiles is not None
    add = replace(profiles.baseline, kernels=(KernelTime(ADD, 0.0, 2000.0),))
    (run_data.run.path / PROFILE_NAME).write_text(to_json(replace(profiles, baseline=add)))
    page = write_report(RunData.of(run_data.run).run)
    context = browser.new_context(viewport={"width": width, "height": 800})
    reader = Reader(context, "file://")
    reader.page.goto(page.as_uri())
    content, whole = measured(reader.page, "html")
    assert content <= whole
    tables = reader.page.locator("[data-part=why] .scroll")
    if width == 1440:  # on a phone some of them scroll by themselves
        for number in range(tables.count()):
            sizes = tables.nth(number).evaluate("e => [e.scrollWidth, e.clientWidth]")
            assert sizes[0] <= sizes[1], tables.nth(number).inner_text()
    else:  # the times of kernels are seen without scrolling
        table = reader.page.locator("[data-part=why] .scroll[aria-label='Kernels of one call']")
        sizes = table.evaluate("e => [e.scrollWidth, e.clientWidth]")
        assert sizes[0] <= sizes[1]
    assert reader.complaints == []
    context.close()
