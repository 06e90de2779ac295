"""What runs inside a worker: the jobs of `handle`, by name.

One child serves one role at a time, each with the jobs that belong to it:

    any role     describe, num_gpus, the device and the machine; what sizes a problem has;
                 keep_to, warm_up,   what a module's forward computes, and whether it is that
                 sizes, capture,     of a family's reference
                 match
    compiler     import_file         one of our own exports
    screening    prepare, screen,    the user's own candidates, checked and timed in place
                 time_baseline
    judge        prepare, ask,       holds the reference; draws inputs, gives the verdict
                 weights, judge,
                 withdraw, free,
                 can_borrow
    baseline     prepare, repeat,    holds the reference; is timed, judges timed outputs
                 time_model,
                 time_steps,
                 timing_set,
                 judge_timed,
                 judge_kept,
                 operations, profile,
                 rounding
    producer     load, receive,      holds one stranger; only produces tensors and times
                 lent_sample, free,
                 answer, time_model,
                 time_steps,
                 take_timing_set, give_up_timing_set,
                 rows_taken,
                 take_all_rows, take_own_rows,
                 repeat,
                 timed_output, give_up_output,
                 kept_outputs,
                 operations, profile

Payloads and answers are JSON; tensors travel as raw bytes beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuner.by_batch import Way
from tuner.capture.capture import capture, in_eval_mode, with_another_batch
from tuner.capture.families import match_of
from tuner.capture.graph.fast_paths import fast_paths
from tuner.capture.graph.graph import Graph
from tuner.capture.graph.settings import settings_of
from tuner.capture.steps.joint import captured_of
from tuner.check.probes import probes
from tuner.check.probes.batches import Extent
from tuner.errors import CaptureError, InputError
from tuner.evaluate.baseline import Baseline
from tuner.evaluate.batch_times import BatchTimes
from tuner.evaluate.child import Answer
from tuner.evaluate.fit import Fit
from tuner.evaluate.judging import Judge
from tuner.evaluate.modules import arguments_for, constructed, free_build_lock, imported
from tuner.evaluate.oracle import Oracle
from tuner.evaluate.producing import Producer
from tuner.evaluate.screening import Screening
from tuner.evaluate.timed import spoilt_by_cuda_errors
from tuner.export.several import take_kernel
from tuner.machine.device import describe
from tuner.machine.doctor import environment
from tuner.machine.limits import limits_of
from tuner.plans import Argument, Tensor
from tuner.problem.accuracy import Accuracy
from tuner.problem.modes import TuneMode, put_into
from tuner.problem.packages import modules_beside
from tuner.problem.reference import ROWS, load_problem
from tuner.problem.timed_data import require_fitting
from tuner.problem.uninitialised import require_initialised
from tuner.storage import sha256_of
from tuner.trial import from_json, to_json

__all__ = ["handle"]


class _Child:
    """One child: what any can do, and its role, which `prepare` or `load` gives it."""

    def __init__(self) -> None:
        self.role: Screening | Judge | Baseline | Producer | BatchTimes | None = None

    def job(self, name: str) -> Callable[..., Answer]:
        """Return the job of that name: of any role, or of this child's."""
        found: Callable[..., Answer] = getattr(self if hasattr(_Child, name) else self.role, name)
        return found

    def limits(self, device: str) -> Answer:
        """Return what a GPU was limited to."""
        import torch

        if device == "cpu":
            return {"limits": {}}, ()
        properties = torch.cuda.get_device_properties(torch.device(device))
        return {"limits": limits_of(str(properties.uuid))}, ()

    def describe(self, device: str) -> Answer:
        found = describe(device)
        return {
            "device": json.loads(to_json(found)),
            "torch_name": found.torch_name,
            "facts": found.facts(),
            "environment": environment(found),
        }, ()

    def num_gpus(self) -> Answer:
        """Count the GPUs that PyTorch sees."""
        import torch

        return {"num_gpus": torch.cuda.device_count() if torch.cuda.is_available() else 0}, ()

    def keep_to(self, cores: list[int]) -> Answer:
        """Run on these cores only, with a thread on each, from now on."""
        import torch

        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))
        return {}, ()

    def warm_up(self, device: str) -> Answer:
        """Import PyTorch and open the device."""
        import torch

        torch.zeros(1, device=device)
        return {}, ()

    def sizes(
        self,
        reference: str,
        sizes: dict[str, int],
        arguments: str,
        model_new: str,
        model_file: str,
        outputs: str,
        mode: TuneMode = "as_given",
        extra: Sequence[str] = (),
        tensors: Sequence[str] = (),
        **_: Any,
    ) -> Answer:
        """Find the named sizes by letting the family's module call a stand-in for its operator.

        `screening` are those of every batch that screening asks for, the problem's own first.
        What is wrong with the module, or with it beside the reference, is found here as well, and
        whether files of `tensors` fit the inputs.
        """
        problem = load_problem(Path(reference), sizes, mode)
        for path in tensors:
            require_fitting(problem, Path(path))
        declared = [from_json(Argument, json.dumps(a)) for a in json.loads(arguments)]
        made = [from_json(Tensor, json.dumps(tensor)) for tensor in json.loads(outputs)]
        fit = Fit(problem, Path(model_file), model_new, declared, made, tuple(extra))
        module = fit.names()
        model = fit.model(module)
        found = fit.sizes(module, model, problem.stand_ins())
        screening = [found]
        asked = probes.screening_probes(
            0, Extent(problem.num_rows())
        )  # fewer rows, if it is large
        for batch in {probe.batch for probe in asked} - {None}:
            with suppress(InputError):  # a batch that the problem does not take
                inputs = problem.stand_ins(batch)
                screening.append(fit.sizes(module, model, inputs))
        fit.rehearse(module, model)
        return {"sizes": found, "screening": screening, "num_rows": problem.num_rows()}, ()

    def capture(self, path: str, mode: TuneMode, batch: int | None = None) -> Answer:
        """Record a module's forward in a mode, and a step of training.

        `batch` is how many rows inputs have, where it is not as many as the file gives.
        `forwards` are as given and, where forward takes one, with another batch; then with the
        graph in eval mode, where that is another one and the module is tuned in training.
        `strided` names inputs that are given in another order of memory than they are drawn in.
        `has_modes` says that it computes something else in the other mode, or draws numbers there.
        """
        problem = load_problem(Path(path), {} if batch is None else {ROWS: batch}, mode)
        if batch is not None:
            problem.num_rows()  # that many can be drawn, or it says why not of the user's file
        graph = capture(problem)
        require_initialised(problem)
        fused = fast_paths(problem)
        other = None
        with suppress(CaptureError):
            other = capture(problem, mode="eval" if graph.is_training else "train")
        if fused and not graph.is_training:
            trained = "" if other is None else "tune it as it is trained, --mode train; or "
            raise CaptureError(
                f"{path}: in eval mode Model.forward runs {' and '.join(fused)}, PyTorch's own "
                "fused operation; expected several, for which kernels are generated\n"
                f"  next: {trained}write torch.backends.mha.set_fastpath_enabled(False) into the "
                "file, which leaves it out"
            )
        has_modes = other is None or graph.key != other.key or bool(fused)
        resized = with_another_batch(problem, graph)
        forwards = [captured_of(problem, g) for g in (graph, resized) if g]
        model = problem.model_without_memory()
        settings = settings_of(model, has_modes)
        both, settings_in_eval = None, {}
        if other is not None and has_modes and not fused and graph.is_training and resized:
            both = in_eval_mode(problem, (graph, resized), other)
        if both is not None:
            forwards = [replace(f, in_eval=g) for f, g in zip(forwards, both, strict=True)]
            settings_in_eval = settings_of(put_into(model, "eval"), has_modes)
        return {
            "forwards": [json.loads(to_json(f)) for f in forwards],
            "strided": [graph.arguments[i].name for i in problem.strided()],
            "settings": settings,
            "settings_in_eval": settings_in_eval,
            "has_modes": has_modes,
            "source": str(problem.source),
            "beside": {n: sha256_of(file) for n, file in modules_beside(Path(path)).items()},
        }, ()

    def match(self, reference: str, sizes: list[str], graphs: list[Any]) -> Answer:
        """Tell what a family's reference is in a module's terms, if its forward is the same.

        `graphs` are the module's: as given and, where it takes one, with another batch.
        """
        graph, *more = [from_json(Graph, json.dumps(g)) for g in graphs]
        matched = match_of(Path(reference), sizes, graph, more[0] if more else None)
        return {"matched": None if matched is None else json.loads(to_json(matched))}, ()

    def import_file(self, file: str) -> Answer:
        """Import one of our own exported files, which compiles it."""
        free_build_lock(Path(file))
        imported(Path(file))
        return {}, ()

    def load_beside(
        self,
        file: str,
        ways: list[Way],
        reference: str,
        sizes: dict[str, int],
        device: str,
        accuracy: str,
        mode: TuneMode,
        kernels: dict[Way, list[int]] | None = None,
        **_: Any,
    ) -> Answer:
        """Load one of our own exported files and the reference; compile what a call compiles.

        `kernels` are those that a file has by way, if several, each of which is timed.
        """
        problem = load_problem(Path(reference), sizes, mode)
        free_build_lock(Path(file))
        module = imported(Path(file))
        init_inputs = arguments_for(problem, vars(module), file)
        times = BatchTimes(
            problem, lambda: constructed(module.ModelNew, init_inputs, device), device,
            Accuracy.parse(accuracy), lambda kernel: take_kernel(vars(module), kernel), kernels,
        )  # fmt: skip
        self.role = times
        with spoilt_by_cuda_errors(device):
            return {"num_rows": times.get_ready(ways)}, ()

    def by_batch(
        self,
        ways: list[Way],
        most_s: float,
        tuned: Sequence[int] = (),
        fixed: Sequence[Way] = (),
    ) -> Answer:
        """Time the file that was loaded beside the reference, at many numbers of rows.

        `failures` says why a way was not timed: "" where nothing has gradients.
        """
        assert isinstance(self.role, BatchTimes)
        with spoilt_by_cuda_errors(self.role.device):
            found = self.role.measured(ways, most_s, tuned, fixed)
        about = {"failures": self.role.failures, "refuses_one": self.role.refuses_one}
        return {"measured": [json.loads(to_json(at)) for at in found], **about}, ()

    def on_ordinary(self, rows: int, way: Way, most_s: float) -> Answer:
        """Time both at one number of rows on ordinary data, on which no given ones follow."""
        assert isinstance(self.role, BatchTimes)
        with spoilt_by_cuda_errors(self.role.device):
            found = self.role.on_ordinary(rows, way, most_s)
        return {"measured": [json.loads(to_json(at)) for at in found]}, ()

    def prepare(
        self,
        reference: str,
        sizes: dict[str, int],
        device: str,
        accuracy: str,
        mode: TuneMode = "as_given",
        screening_seed: int | None = None,
        is_timed: bool = True,
        model_new: str = "",
        **_: Any,
    ) -> Answer:
        """Load the reference: to screen with it, to be timed as the baseline, or to judge."""
        oracle = Oracle(reference, sizes, device, accuracy, mode)
        if screening_seed is not None:
            self.role = Screening(oracle, screening_seed, model_new)
        else:
            self.role = Baseline(oracle) if is_timed else Judge(oracle)
        return (self.role if isinstance(self.role, Judge) else oracle).about(), ()

    def load(self, **what: Any) -> Answer:
        """Load a contender; the child is its producer from now on."""
        self.role = producer = Producer(**what)
        return {"notes": producer.notes}, ()


_CHILD = _Child()
GIVEN_BLOBS = {
    "answer", "can_borrow", "judge", "judge_kept", "judge_timed", "receive", "take_timing_set",
}  # fmt: skip


def handle(job: str, payload: dict[str, Any], blobs: list[memoryview]) -> Answer:
    """Run one job of this child; payload entries are the job's arguments."""
    run = _CHILD.job(job)
    if job in GIVEN_BLOBS:
        return run(**payload, blobs=blobs)
    return run(**payload)
