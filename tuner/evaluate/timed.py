"""The model that is timed in a worker: the clock, inputs that rotate, calls back to back."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner.check.calls.exercise import kinds_of, outputs_of, recorded, snapshot
from tuner.check.calls.surroundings import changed, settings
from tuner.evaluate.child import Answer, Fault
from tuner.evaluate.exposed import num_preempted
from tuner.evaluate.inputs import RotatingInputs
from tuner.evaluate.kept import Keeper
from tuner.evaluate.measure import measure
from tuner.evaluate.rounding import rounding_at_rows
from tuner.evaluate.steps import step_of
from tuner.evaluate.timers import CpuTimer, CudaTimer, Timer
from tuner.machine.device import describe
from tuner.machine.gpu_memory import free_cached, num_shortages
from tuner.machine.platforms import is_gpu, platform_of
from tuner.problem.accuracy import Accuracy, math_mode
from tuner.problem.draws import seed_of_inputs
from tuner.problem.reference import Problem
from tuner.problem.timed_data import made_data
from tuner.trial import Measurement
from tuner.wording import one_line

if TYPE_CHECKING:
    import torch

__all__ = [
    "INPUT_SEED",
    "NUM_UNTIMED",
    "WEIGHT_SEED",
    "LastCall",
    "Timed",
    "spoilt_by_cuda_errors",
]

# Until the threads of the process that had its turn before sleep; with a GPU these are few.
SETTLE_S = {"cpu": 0.03, "cuda": 0.005}
NUM_PROFILED = 6  # calls; the first one gets the profiler itself ready
TRACED = ("user_annotation", "cpu_op", "kernel", "gpu_memcpy", "gpu_memset")  # by the profiler
NUM_UNTIMED = 2  # calls of each turn that are not timed
WEIGHT_SEED = 20_000  # of the weights that are timed; probes draw their own
INPUT_SEED = seed_of_inputs(WEIGHT_SEED)


class LastCall(NamedTuple):
    """The last call of `repeat`: its number, what it returned, what the calls changed."""

    number: int
    outputs: tuple[Any, ...]
    kinds: tuple[str, ...]  # of them, and of what holds them
    changes: tuple[str, ...]  # to PyTorch's settings


class Timed:
    """A model, the inputs that it is timed on, and the clock.

    Made before a stranger's file is imported, which may patch what a timer is made of.
    """

    def __init__(self, device: str, accuracy: Accuracy) -> None:
        self._device, self._accuracy = device, accuracy
        self._model: torch.nn.Module | None = None
        self.buffers_before: dict[str, torch.Tensor] = {}  # of the reference, as it was taken
        self.inputs = RotatingInputs([])
        self.keeper = Keeper(device)
        self.last: LastCall | None = None
        self.num_in_vain = 0  # times that memory ran out, but not for what is timed
        self.timer = _timer(device)
        self.timer.renew = lambda call: self.inputs.renew(call)

    @property
    def model(self) -> torch.nn.Module:
        """What is timed: the reference, or a candidate."""
        assert self._model is not None
        return self._model

    def take(self, model: torch.nn.Module, inputs: list[Any]) -> None:
        """Time that model on these inputs from now on."""
        self._model, self.last = model, None
        self.keeper.clear()
        self.inputs = RotatingInputs(inputs)

    def take_reference(self, problem: Problem) -> None:
        """Time the reference on its own inputs from now on."""
        self._model = problem.make_model(WEIGHT_SEED, self._device, is_quick=True)
        self.inputs = RotatingInputs(problem.make_inputs(INPUT_SEED, device=self._device))
        self._keep_buffers()

    def take_data(self, problem: Problem, name: str, path: str = "") -> str:
        """Time the reference on other data from now on, by their name; say what they are.

        Raises:
            ProblemError: as `made_data`.
        """
        self.inputs = RotatingInputs([])  # first, since there may be no memory for both
        self.last = None
        self.keeper.clear()
        self._model = None  # its statistics are no longer those that it was constructed with
        self._model = problem.make_model(WEIGHT_SEED, self._device, is_quick=True)
        inputs, words = made_data(problem, self.model, name, WEIGHT_SEED, self._device, path)
        self.inputs = RotatingInputs(inputs)
        self._keep_buffers()
        return words

    def _keep_buffers(self) -> None:
        self.buffers_before = {n: b.detach().clone() for n, b in self.model.named_buffers()}

    def measure(
        self,
        model: Any,
        budget_s: float,
        max_noise: float,
        stop_above_us: float | None,
        is_bound_here: bool = False,
    ) -> Measurement:
        """Measure a model on these inputs, until it is known or clearly slow."""
        import torch

        self.timer.is_bound_here = is_bound_here
        inputs = self.inputs
        with torch.no_grad(), math_mode(self._accuracy):
            return measure(
                self.timer,
                lambda i: model(*inputs[i]),
                budget_s=budget_s,
                max_noise=max_noise,
                stop_above_us=stop_above_us,
            )

    def rounding(self) -> Answer:
        """Return in which layouts the model's convolutions are rounded, in its accuracy class."""
        import torch

        with torch.no_grad(), math_mode(self._accuracy):
            return {"rounds": rounding_at_rows(self.model, self.inputs[0])}, ()

    def time_model(self, num_samples: int, num_untimed: int = NUM_UNTIMED) -> Answer:
        """Return that many samples of one call's time; the caller interleaves processes.

        A few elements of each call's outputs are kept, also of those that are not timed.

        Untimed calls come first: after its turn, another process's OpenMP threads spin for some
        10 ms on the cores that this one needs, and what it left in the caches is gone.
        """
        model, inputs = self.model, self.inputs
        self.timer.keep = self.keeper.keep
        throttled_before = self.timer.num_throttled
        preempted_before, start_s = num_preempted(), time.perf_counter()
        with self._calls():
            self._settle()
            self.timer.samples(lambda i: model(*inputs[i]), num_untimed)
            samples = self.timer.samples(lambda i: model(*inputs[i]), num_samples)
        return {
            "samples_us": samples,
            "is_cold": self.timer.is_cold,
            "num_throttled": self.timer.num_throttled - throttled_before,
            "num_shortages": num_shortages(self._device) - self.num_in_vain,
            # A stranger may have patched the clock: no time is no reason to fail here.
            "preempted_per_s": (num_preempted() - preempted_before)
            / max(time.perf_counter() - start_s, 1e-3),
        }, ()

    def time_steps(self, num_samples: int) -> Answer:
        """Return that many samples of a step's time: forward, and gradients of all that is given.

        None where a step cannot be taken, with the reason, "" where nothing of what forward
        returns has a gradient. What a step gives is not kept: these are times of files that were
        checked.
        """
        import torch

        model, inputs = self.model, self.inputs
        take = step_of(model)

        def step(call: int) -> Any:
            return take(inputs[call])

        self.timer.keep = None
        with self._calls(), torch.enable_grad():
            self._settle()
            try:
                self.timer.samples(step, 1)
            except RuntimeError as error:
                return {"samples_us": None, "reason": one_line(str(error), 200)}, ()
            return {"samples_us": self.timer.samples(step, num_samples)}, ()

    def _settle(self) -> None:
        time.sleep(SETTLE_S[self._device.partition(":")[0]])

    def repeat(self, num_calls: int) -> Answer:
        """Call back to back, and copy the last output at once; the caller holds the clock."""
        import torch

        model, inputs = self.model, self.inputs
        self.last = None
        with self._calls():
            before = settings()
            self._settle()
            if not num_calls:
                return {}, ()  # what asking costs by itself
            for _ in range(num_calls):
                call = inputs.fresh_call()
                result = model(*inputs.of_call(call))
                self.keeper.keep(call, result)
            outputs, kinds = outputs_of(result), kinds_of(result)
            copies = tuple(snapshot(y) if isinstance(y, torch.Tensor) else y for y in outputs)
            self.last = LastCall(call, copies, kinds, tuple(changed(before)))
            del result, outputs
        return {}, ()

    @contextmanager
    def _calls(self) -> Iterator[None]:
        """Call the model as it is timed; what that leaves unused is given to other processes."""
        import torch

        with torch.no_grad(), math_mode(self._accuracy), spoilt_by_cuda_errors(self._device):
            yield
        free_cached(self._device)

    def operations(self) -> Answer:
        """Return PyTorch's operations of one untimed call; none of a module that is compiled."""
        names: list[str] = []
        with self._calls():
            inputs = self.inputs.of_call(self.inputs.fresh_call())
            if not _is_compiled(self.model):
                with recorded(names):
                    self.model(*inputs)
        return {"operations": names}, ()

    def profile(self) -> Answer:
        """Return what a few warm calls ran, as events of the Chrome trace that PyTorch writes."""
        from torch.profiler import ProfilerActivity, profile, record_function

        kinds = [ProfilerActivity.CPU]
        if is_gpu(self._device):
            kinds.append(ProfilerActivity.CUDA)
        model, inputs = self.model, self.inputs
        synchronize = platform_of(self._device).synchronize
        with self._calls():
            for _ in range(NUM_UNTIMED):
                model(*inputs.of_call(inputs.fresh_call()))
            with profile(activities=kinds) as found:
                for _ in range(NUM_PROFILED):
                    given = inputs.of_call(inputs.fresh_call())
                    synchronize(self._device)
                    with record_function("call"):
                        model(*given)
                        synchronize(self._device)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            events = json.loads(path.read_text(errors="replace"))["traceEvents"]
        names = ("name", "cat", "ts", "dur", "args")
        kept = [{k: e.get(k) for k in names} for e in events if e.get("cat") in TRACED]
        return {"events": kept}, ()

    def counted(self) -> None:
        """Make one call between the marks that let a profiler of the driver's begin and end."""
        import torch

        model, inputs = self.model, self.inputs
        has_marks = is_gpu(self._device)
        with self._calls():
            for _ in range(NUM_UNTIMED):
                model(*inputs.of_call(inputs.fresh_call()))
            given = inputs.of_call(inputs.fresh_call())
            platform_of(self._device).synchronize(self._device)
            with torch.cuda.profiler.profile() if has_marks else nullcontext():
                model(*given)
                platform_of(self._device).synchronize(self._device)


@contextmanager
def spoilt_by_cuda_errors(device: str) -> Iterator[None]:
    """Raise Fault when the device no longer answers: the context is lost with all in it."""
    try:
        yield
        platform_of(device).synchronize(device)
    except Exception as error:
        try:
            platform_of(device).synchronize(device)
        except Exception as sticky:
            raise Fault(f"{type(error).__name__}: {error}") from sticky
        raise


def _timer(device: str) -> Timer:
    if is_gpu(device):
        return CudaTimer(int(device.partition(":")[2] or 0))
    return CpuTimer(l3_bytes=describe(device).l3_bytes)


def _is_compiled(model: torch.nn.Module) -> bool:
    """Whether something in this process is compiled by PyTorch: tracing would run it otherwise."""
    import torch

    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return True
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo is not None and bool(dynamo.counters["stats"]["unique_graphs"])
