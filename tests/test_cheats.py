"""Cheats that need processes to be shown: each is rejected, or named, and the judge lives on.

Those that the verdict on one answer tells are in test_check.py.
"""

from __future__ import annotations

import importlib.util
import py_compile
import re
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_problem import FLAGSHIP

from tuner.check.calls.lending import STAGING_SHARE
from tuner.check.probes.probes import thorough_probes
from tuner.errors import StorageError, WorkerError
from tuner.evaluate import process, second_clock
from tuner.evaluate.again import Query
from tuner.evaluate.contender import Contender
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.modules import imported
from tuner.evaluate.needs import Needs
from tuner.evaluate.pair import Shares
from tuner.evaluate.racing import Racer
from tuner.evaluate.verifier import Verifier
from tuner.machine.ceilings import impossible_us
from tuner.machine.device import describe
from tuner.machine.turns import HALF

CHEATS = Path(__file__).parent / "cheats"
SEED = 21

# What the verdict says of each. The first probe tells, since the process does not outlive it.
REJECTED = {
    "computed_when_copied": "as given: it replaced torch.Tensor.detach",
    "crashes": "as given: killed by signal 11 (SIGSEGV)",
    "forks": "as given: 1 forks of its process outlived the call",
    "hangs": "as given: no answer within 3 s",
    "kills_its_parent": "as given: killed by signal 9 (SIGKILL)",
    "leaves_for_good": "as given: exited with status 0 without an answer",
    "lets_a_fork_answer": "as given: no answer within 3 s",
    "other_layers": "as given: it replaced torch.nn.Sequential.forward",
    "rewrites_the_judge": "as given: output of call 1",
    "writes_to_descriptors": "as given: garbled the channel",
}
OWN = "runs the reference's own operations (addmm, mul, native_batch_norm)"
NAMED = {
    "falls_back_in_except": [
        "runs the reference's own operations (addmm, mul, native_batch_norm)"
    ],
    "holds_the_reference": [OWN],
    "redefined_sizes": ["it redefines batch_size as 2; it was asked at 64"],
}
# Each of these is an honest reason to refuse a cheat on the clock. Which comes first is up to the
# machine: the physical floor of one with few cores is above what a clock can tell from 0 us, that
# of another is below; and beside other work the second clock may contradict a call that does
# nothing before its output is looked at.
FLOOR = r"[\d.]+ us is below the physical floor of [\d.]+ us: the work cannot have been done"
CLOCKS = r"its process tells \d+ us a call, another process's clock says \d+ us: a patched timer"
OUTPUT = r"after timing: output of call 1.*is it right only while it is being"
KEPT = r"the output of a timed call was wrong: element \d+ of output 1: got .*, expected "
TIMED = {
    "half_the_rows_while_timed": [KEPT],
    "looks_at_its_callers": [KEPT],
    "skips_every_other_call": [OUTPUT, KEPT],
    "works_until_timed": [FLOOR, CLOCKS, OUTPUT],
}
ON_CUDA = {
    "corrupts_the_context": "device-side assert",
    "exhausts_device_memory": "out of memory",
    # What is written late may fall into what has the memory by then.
    "side_stream": ("changed after the call had returned", "input 0 was edited by the call"),
    "switches_tf32_on": "other settings: matmul precision is high, was highest",
}


def task_of(folder: Path, device: str = "cpu") -> JobSpec:
    reference = folder / "reference.py"
    reference.write_text(FLAGSHIP)
    floor_us = impossible_us(2 * 64 * 48 * 40, 0.0, describe(device), "fp16x2")
    return JobSpec(str(reference), {}, device, "float32", "", "[]", "", floor_us)


@pytest.fixture(scope="module")
def verifier(tmp_path_factory) -> Iterator[Verifier]:
    task = task_of(tmp_path_factory.mktemp("cheats"))
    with Verifier(task, seed=SEED, timeout_s=60.0) as verifier:
        yield verifier


def cheat(name: str) -> Contender:
    return Contender.of_file(CHEATS / f"{name}.py", is_deterministic=True)


@pytest.mark.parametrize("name", sorted(REJECTED))
def test_the_process_that_cheats_is_rejected_and_named(name, verifier, monkeypatch):
    if "no answer" in REJECTED[name]:
        monkeypatch.setattr(verifier, "_timeout_s", 3.0)
    check = verifier.check(cheat(name))
    assert not check.is_accepted and not check.probes[-1].is_accepted
    assert check.reason.startswith(REJECTED[name]), check.reason


def test_two_pairs_of_processes_reject_what_one_does(tmp_path, verifier, monkeypatch):
    monkeypatch.setenv("FEW_PROBES", "1")
    with Verifier(task_of(tmp_path), seed=SEED, timeout_s=60.0, num_pairs=2) as wide:
        for name in ("crashes", "rewrites_the_judge", "forks"):
            check = wide.check(cheat(name))
            assert not check.is_accepted and not check.probes[-1].is_accepted
            assert check.reason.startswith(REJECTED[name]), check.reason
        name = sorted(NAMED)[0]
        asked, one = (each.check(cheat(name)) for each in (wide, verifier))
        assert asked.is_accepted, asked.reason
        assert [r.probe for r in asked.probes] == [r.probe for r in one.probes]


def test_a_process_that_takes_all_memory_is_killed_and_named(verifier, monkeypatch):
    # As if the machine had 700 MB left: what it takes is real, the rest of the machine is hidden.
    hidden = process.available_bytes() - process.RESERVE_BYTES - 700 * 2**20
    real = process.available_bytes
    monkeypatch.setattr(process, "available_bytes", lambda: real() - hidden)
    check = verifier.check(cheat("exhausts_memory"))
    assert not check.is_accepted and "GiB of memory" in check.reason


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_right_answer_by_means_worth_nothing_is_accepted_and_named(name, verifier):
    check = verifier.check(cheat(name))
    assert check.is_accepted, check.reason
    for words in NAMED[name]:
        assert words in " | ".join(check.notes)


@pytest.mark.parametrize("name", sorted(TIMED))
def test_a_cheat_on_the_clock_is_refused_in_the_race(name, tmp_path):
    with pytest.raises(WorkerError, match=rf"^{name}\.py: (?:{'|'.join(TIMED[name])})"):
        for _ in range(5):  # a busy machine may make no calls in bursts, where one cheats
            Racer(task_of(tmp_path)).race([cheat(name)], num_processes=1, seconds=0.01)


def look_twice_without_rest(monkeypatch) -> None:
    """Compare clocks twice, and wait for nothing where other tests keep the processor busy."""
    for name, value in (("CROSS_CHECKS", 2), ("BUSY_CHECKS", 1), ("BUSY_REST_S", 0.0)):
        monkeypatch.setattr(second_clock, name, value)


@pytest.mark.parametrize(("floor_us", "reason"), [(0.0, CLOCKS), (1.0, FLOOR)])
def test_a_stopped_clock_is_found_out_by_each_of_two_means(
    tmp_path, floor_us, reason, monkeypatch
):
    # Its calls sleep 1 ms and are reported as 0 us: no load makes the clocks agree, and each look
    # at them takes a second.
    look_twice_without_rest(monkeypatch)
    task = replace(task_of(tmp_path), impossible_us=floor_us)
    with pytest.raises(WorkerError, match=rf"^patched_timers\.py: {reason}"):
        Racer(task).race([cheat("patched_timers")], num_processes=1, seconds=0.01)


def test_a_clock_that_stops_on_ordinary_data_alone_is_found_out(tmp_path, monkeypatch):
    look_twice_without_rest(monkeypatch)
    text = (CHEATS / "patched_timers.py").read_text()
    stop = text[text.index("time.perf_counter_ns = ") :]
    # What is timed is constructed once for each of the data, the given ones first.
    text = text.replace(stop, "made = []\n\n\ndef stop():\n" + textwrap.indent(stop, "    "))
    text = text.replace(
        "        super().__init__()",
        "        super().__init__()\n        made.append(1)\n        if len(made) == 2:\n"
        "            stop()",
    )
    path = tmp_path / "stops_late.py"
    path.write_text(text)
    contender = Contender.of_file(path, is_deterministic=True)
    task = replace(task_of(tmp_path), impossible_us=0.0)  # the floor sees that as well
    how = {"num_processes": 1, "seconds": 0.01}
    assert Racer(task).race([contender], **how).num_processes == 1
    with pytest.raises(WorkerError, match=rf"^stops_late\.py: {CLOCKS}"):
        Racer(task).race([contender], others={"ordinary": ""}, **how)


def test_a_cheat_that_rewrites_its_file_is_rejected(verifier, tmp_path):
    path = tmp_path / "rewrites_itself.py"
    text = (CHEATS / "holds_the_reference.py").read_text()
    more = "\nfrom pathlib import Path\nPath(__file__).write_text('ModelNew = None')\n"
    path.write_text(text + more)
    check = verifier.check(Contender.of_file(path, is_deterministic=True))
    assert not check.is_accepted
    assert check.reason == f"{path} was rewritten while it was being verified"


def test_bytecode_of_another_text_beside_a_file_is_not_what_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "stranger", None)
    path = tmp_path / "two_texts.py"
    path.write_text("reported = 'the bytecode'\n")
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    kept = Path(py_compile.compile(str(path), doraise=True, invalidation_mode=unchecked) or "")
    assert kept == Path(importlib.util.cache_from_source(str(path)))
    before = kept.read_bytes()
    path.write_text("reported = 'the text'\n")
    assert imported(path).reported == "the text" and kept.read_bytes() == before


def test_what_pytorchs_compiler_replaces_is_no_cheat(verifier, tmp_path, monkeypatch):
    monkeypatch.setenv("FEW_PROBES", "1")
    path = tmp_path / "compiled_inside.py"
    text = (CHEATS / "holds_the_reference.py").read_text()
    text = (
        text.replace("x) * self.scale", "x).mul(self.scale)")
        + """

compiled = torch.compile(lambda z: z + 0, backend="eager", dynamic=True)
compiled(torch.ones(3))
"""
    )
    path.write_text(text)
    check = verifier.check(Contender.of_file(path, is_deterministic=True))
    assert check.is_accepted, check.reason


def test_every_cheat_is_tried_somewhere():
    from test_check import CHEATS as in_one_answer
    from test_trust_classes import WRONG as by_class

    elsewhere = {"exhausts_memory", "patched_timers", "persisting_l2"}
    elsewhere |= {"wrong_where_it_leaves_few_rows"}  # test_by_batch
    tried = {*REJECTED, *NAMED, *TIMED, *ON_CUDA, *in_one_answer, *by_class, *elsewhere}
    assert {path.stem for path in CHEATS.glob("*.py")} == tried


# ---- on a GPU -------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(ON_CUDA))
def test_the_cheat_on_cuda_is_rejected_and_named(name, tmp_path):
    with Verifier(task_of(tmp_path, "cuda:0"), seed=SEED) as verifier:
        check = verifier.check(cheat(name))
    words = (ON_CUDA[name],) if isinstance(ON_CUDA[name], str) else ON_CUDA[name]
    assert not check.is_accepted and any(w in check.reason for w in words), check.reason


@pytest.mark.gpu
@pytest.mark.parametrize("num_pairs", [1, 2])
def test_what_a_check_takes_of_a_gpus_memory_is_seen(num_pairs, tmp_path):
    honest = Contender.of_file(CHEATS / "holds_the_reference.py", is_deterministic=True)
    with Verifier(task_of(tmp_path, "cuda:0"), seed=SEED, num_pairs=num_pairs) as verifier:
        assert verifier.check(honest).is_accepted
        seen = verifier._needs._seen
        total_bytes = verifier._needs.total_bytes
    assert min(len(some) for some in seen.values()) > 20
    for some in seen.values():
        # What cuBLAS wants for each thread and stream is no part of an estimate: 32 MB each, which
        # made 1.8 GB of an H200. Nor is the piece that a contender lends for a whole check.
        more = 2**31 / total_bytes + STAGING_SHARE
        assert all(0.0 < used < estimated + more for estimated, used in some)


@pytest.mark.gpu
def test_cache_lines_that_a_candidate_keeps_are_taken_back_before_each_sample(tmp_path):
    import ctypes

    from tuner.evaluate.timers import CudaTimer

    spec = importlib.util.spec_from_file_location("persisting_l2", CHEATS / "persisting_l2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.ModelNew(48, 40, (40,)).cuda()
    x = torch.randn(64, 48, device="cuda")
    timer, limit = CudaTimer(0), ctypes.c_size_t()
    timer.samples(lambda _: model(x), 3)
    timer.samples(lambda _: None, 1)
    ctypes.CDLL("libcuda.so.1").cuCtxGetLimit(ctypes.byref(limit), 6)
    assert limit.value == 0 and timer._batch_size == 1


def test_a_file_that_one_of_its_processes_cannot_load_is_not_asked(tmp_path):
    count = tmp_path / "count"
    file = tmp_path / "sometimes.py"
    file.write_text(
        (CHEATS / "holds_the_reference.py").read_text()
        + textwrap.dedent(f"""
        import os
        with open({str(count)!r}, "a") as count:
            count.write("x")
        if os.path.getsize({str(count)!r}) == 4:  # the last of them, whichever that is
            raise RuntimeError("not here")
        """)
    )
    with Verifier(task_of(tmp_path), seed=SEED, num_pairs=4) as verifier:
        check = verifier.check(Contender.of_file(file, is_deterministic=True))
    assert count.read_text() == "x" * 4
    assert not check.is_accepted and check.reason == "importing it: RuntimeError: not here"


def test_a_compiler_that_finds_the_disk_full_is_no_verdict_on_a_file(tmp_path):
    file = tmp_path / "compiled.py"
    said = "Error building extension: fatal error: error writing to a.s: No space left on device"
    file.write_text(f"raise RuntimeError({said!r})\n")
    with Verifier(task_of(tmp_path), seed=SEED) as verifier:
        with pytest.raises(StorageError, match=r"no space left(.|\n)*next: free some"):
            verifier.check(Contender.of_file(file, is_deterministic=True))


def test_processes_that_were_opened_before_are_those_that_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("FEW_PROBES", "1")
    file = tmp_path / "says_where.py"
    honest = (CHEATS / "holds_the_reference.py").read_text()
    file.write_text(f"import os\nopen(f'{tmp_path}/{{os.getpid()}}.pid', 'w').close()\n{honest}")
    contender = Contender.of_file(file, is_deterministic=True)
    asked = []
    with Verifier(task_of(tmp_path), seed=SEED, num_pairs=2) as verifier:
        verifier.opened.open_sets(verifier._spec, 2, 1)
        opened = {worker.pid for worker in verifier.opened._opening[0].result()[1]}
        for _ in range(2):
            assert verifier.check(contender).is_accepted
            asked.append({int(path.stem) for path in tmp_path.glob("*.pid")})
    assert asked[0] == opened and len(opened) == 2
    assert len(asked[1]) == 4, "the second check started its own"


def test_a_check_that_needs_much_memory_ends_no_judge_of_another(tmp_path, monkeypatch):
    monkeypatch.setenv("FEW_PROBES", "1")
    honest = CHEATS / "holds_the_reference.py"
    with Verifier(task_of(tmp_path), seed=SEED, num_pairs=2) as verifier:
        # As if what is asked of all rows took half of a GPU.
        monkeypatch.setattr(Needs, "share", lambda _, probe: 0.1 if probe.batch else HALF)
        is_begun, may_go_on = threading.Event(), threading.Event()

        def first(answered):  # its processes answer all that takes little meanwhile
            is_begun.set()
            assert may_go_on.wait(60.0)

        def second(answered):
            may_go_on.set()

        contender = Contender.of_file(honest, is_deterministic=True)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(verifier.check, contender, first)
            assert is_begun.wait(60.0)
            time.sleep(5.0)
            checks = [verifier.check(contender, second), asked.result()]
    assert [check.is_accepted for check in checks] == [True, True], checks


def test_who_has_answered_its_share_takes_the_last_probes_of_another():
    probes = thorough_probes(seed=5, num_rows=64)
    queries = [Query(p, is_by_kernels=kernels) for p in probes for kernels in (False, True)]
    shares = Shares(queries, 3)
    slow = shares.of(0)
    first = [next(slow) for _ in range(3)]
    rest = [*shares.of(1)]  # with all that the others have left, but for what is begun
    begun = [*slow]
    assert [*shares.of(2)] == []
    assert sorted(q.name for q in [*first, *rest, *begun]) == sorted(q.name for q in queries)
    assert {q.probe for q in [*first, *begun]}.isdisjoint(q.probe for q in rest)
    names = [q.probe.name for q in rest]
    assert [names[n] for n in range(0, len(names), 2)] == names[1::2]  # a probe's stay together


class Clocked:
    """Calls of two processes by a clock of their own: how long the contender's take is told."""

    def __init__(self, slow_looks: int) -> None:
        self.slow_looks = slow_looks

    def burst(self, racer: str, number: int) -> SimpleNamespace:
        self.slow_looks -= 1
        return SimpleNamespace(data={"samples_us": [100.0] * number})

    def repeat(self, racer: str, count: int) -> None:
        is_slow = racer == "contender" and self.slow_looks > 0
        time.sleep(count * (2e-3 if is_slow else 1e-4))


@pytest.mark.parametrize(
    ("load", "slow_looks", "said"),
    [
        (0.0, 2, ""),
        (0.0, 9, rf"{CLOCKS}, or work that is not waited for$"),
        (99.0, 9, ""),  # others had the processor, for longer than usual
        (99.0, 99, rf"{CLOCKS}, or .*; or other programs: load 99\.0 on \d+ cores$"),
    ],
)
def test_a_processor_that_others_want_too_is_given_time(monkeypatch, load, slow_looks, said):
    for name, value in (("CROSS_CHECKS", 2), ("BUSY_CHECKS", 5), ("BUSY_REST_S", 0.01)):
        monkeypatch.setattr(second_clock, name, value)
    monkeypatch.setattr(second_clock.os, "getloadavg", lambda: (load, 0.0, 0.0))
    clock = second_clock.SecondClock(Clocked(slow_looks), is_gpu=False)
    refusal = clock.refusal(["baseline", "contender"], [100.0, 100.0], 1, False)
    assert re.match(said or "$", refusal), refusal
