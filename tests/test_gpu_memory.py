"""Memory of a GPU that libraries lack without saying so, on a real one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from tuner.check.probes.probe import Probe
from tuner.config.run_config import load_config
from tuner.errors import WorkerError
from tuner.evaluate.asking import Fewer, is_of_memory, require_memory, with_memory
from tuner.machine import gpu_memory
from tuner.machine.turns import ALL, LITTLE, Turns
from tuner.session.tuning import derive_operator, plan

WIDE = """
import torch


class Model(torch.nn.Module):
    def forward(self, x):
        return x * torch.tanh(x)


def get_inputs():
    return [torch.rand(64, 2048)]


def get_init_inputs():
    return []
"""


def test_a_cpu_has_room_for_every_library():
    gpu_memory.require_room("cpu")
    gpu_memory.require_no_shortage("cpu")
    assert gpu_memory.num_shortages("cpu") == 0


def test_what_ran_out_of_memory_is_timed_again_with_more_and_then_with_all_of_it(tmp_path):
    turns, seen = Turns(tmp_path), []

    def race():
        other = Turns(tmp_path, patience_s=0.2)
        begun_s = time.monotonic()
        with other.memory(LITTLE):
            has_waited = time.monotonic() - begun_s > 0.1
        seen.append((turns.has_all_memory, has_waited))
        require_memory(turns, num_shortages=1)
        return "raced"

    assert with_memory(turns, race, LITTLE) == "raced"
    assert seen == [*[(False, False)] * 4, (True, True)]
    assert not turns.has_all_memory


def test_what_takes_much_memory_waits_for_it_before_it_runs_out(tmp_path):
    small, large = Turns(tmp_path), Turns(tmp_path)
    seen = []

    def race():
        seen.append(large.has_all_memory)
        raise WorkerError("CUDA out of memory")

    with ThreadPoolExecutor(1) as pool:  # which waits for what was asked, at its end
        with small.memory():
            asked = pool.submit(with_memory, large, race, ALL)
            time.sleep(0.2)
            assert not seen  # another tuner has some of it
        with pytest.raises(WorkerError):
            asked.result()
    assert seen == [True]  # and is not tried once more


def test_of_a_gpus_memory_a_search_takes_what_its_calls_hold(tmp_path):
    path = tmp_path / "wide.py"
    path.write_text(WIDE)
    planned = plan(load_config(derive_operator(path).config, {"device": "cuda"}), may_assume=True)
    rows = [round(part * planned.device.memory_bytes / (8192 + 8192)) for part in (0.005, 0.1, 1)]
    larger = [replace(planned, sizes={**planned.sizes, "batch": number}) for number in rows]
    shares = [each.spec.memory_share for each in larger]
    assert shares[0] == LITTLE < shares[1] < ALL == shares[2]


def test_memory_that_another_thread_has_is_not_waited_for(tmp_path):
    turns = Turns(tmp_path)
    with turns.memory():  # as a worker of this process has it
        assert with_memory(turns, lambda: require_memory(turns, num_shortages=1)) is None
        assert not turns.has_all_memory


def test_a_race_without_a_shortage_takes_no_more_memory(tmp_path):
    turns = Turns(tmp_path)
    with turns.memory():
        require_memory(turns, num_shortages=0)
        with pytest.raises(WorkerError) as failure:
            require_memory(turns, num_shortages=2)
    assert is_of_memory(failure.value)


def test_what_takes_as_much_as_what_lacked_memory_is_asked_with_less_at_once():
    fewer = Fewer(num_rows=8)
    first, second, small = (
        Probe(name, batch=batch, calls=calls, tells="?")
        for name, batch, calls in (("first", None, 4), ("second", 16, 3), ("small", 2, 2))
    )

    def taken_by(probe: Probe) -> int:
        return (probe.batch or 8) * probe.calls

    assert fewer.limit([first, second, small], taken_by)
    assert taken_by(fewer.asked(first)) == 16 and fewer.asked(second).batch == 8
    assert fewer.asked(small) == small
    assert fewer.limit([first], taken_by) and fewer.asked(first).batch == 2
    while fewer.limit([first], taken_by):
        pass
    least = fewer.asked(first)
    assert (least.batch, least.calls) == (1, 2), "calls are left out where rows are few"
    assert len(fewer.notes([first, second, small])) == 2


@pytest.mark.gpu
def test_a_library_that_lacks_memory_says_nothing_and_is_noticed(whole_gpu):
    """Without the memory that it wants, cuDNN makes NaN of the neighbours of a NaN."""
    layer = torch.nn.Conv2d(64, 128, 3, device="cuda")
    x = torch.rand(2, 64, 512, 1024, device="cuda", requires_grad=True)
    y = layer(x)
    incoming = torch.randn_like(y)
    torch.autograd.grad(y.sum(), x, retain_graph=True)  # what is loaded at first takes memory
    gpu_memory.free_all_unused("cuda")
    gpu_memory.require_room("cuda")
    before = gpu_memory.num_shortages("cuda")
    for rest in (2**30, 2**29):  # with 2 GB it never does; which of its ways it takes is its own
        free = torch.cuda.mem_get_info()[0]
        filling = torch.empty(free - rest, dtype=torch.uint8, device="cuda")
        with pytest.raises(torch.OutOfMemoryError, match=r"out of memory: .* may take another"):
            gpu_memory.require_room("cuda")
        torch.autograd.grad(y, [x, layer.weight], incoming, retain_graph=True)
        del filling
        gpu_memory.free_all_unused("cuda")
        gpu_memory.require_room("cuda")
        if gpu_memory.num_shortages("cuda") > before:
            break
    assert gpu_memory.num_shortages("cuda") > before
    with pytest.raises(torch.OutOfMemoryError, match=r"out of memory in this process"):
        gpu_memory.require_no_shortage("cuda")
