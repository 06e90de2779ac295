"""Which devices of this host a run uses: those of `--devices`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from tuner.errors import DeviceError, InputError
from tuner.evaluate.job_spec import asked, new_worker
from tuner.machine.forkserver import CORES
from tuner.machine.platforms import is_gpu

__all__ = ["Chosen", "chosen_devices", "kept_to"]

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class Chosen:
    """Devices of this host.

    Attributes:
        names: `cuda:0`, or `cpu:0` for a part of the processor; the first one leads: the run is
            planned for it, and its finalists are checked and raced there.
        cores: of each part of the processor.
    """

    names: tuple[str, ...]
    cores: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def torch_name(self, name: str) -> str:
        """Return what PyTorch calls a device."""
        return "cpu" if name in self.cores else name


def chosen_devices(text: str, device: str, env: Mapping[str, str]) -> Chosen:
    """Return the devices that `--devices` names.

    Args:
        text: `all`, or numbers such as `0,1`.
        device: of the config: `auto`, `cpu`, `cuda` or `cuda:N`.
        env: of the process that is asked for GPUs.

    Raises:
        InputError: the text is none of these.
        DeviceError: there are not so many.
    """
    if text != "all" and not re.fullmatch(r"\d+(,\d+)*", text):
        raise InputError(f"--devices: got {text!r}\n  expected: all, or numbers such as 0,1")
    numbers = [] if text == "all" else [int(number) for number in text.split(",")]
    if len(set(numbers)) < len(numbers):
        raise InputError(f"--devices: got {text!r}\n  expected: each number once")
    num_gpus = 0
    if device != "cpu":
        with new_worker("cpu", name="devices", env=env, is_ours=True) as worker:
            num_gpus = int(asked(worker, "num_gpus", {}).data["num_gpus"])
    if num_gpus or (device != "auto" and is_gpu(device)):
        return _gpus(numbers or list(range(num_gpus)), num_gpus)
    return _parts(numbers or [0])


def _gpus(numbers: list[int], num_gpus: int) -> Chosen:
    missing = [f"cuda:{number}" for number in numbers if number >= num_gpus]
    if missing or not numbers:
        raise DeviceError(
            f"--devices: no {', '.join(missing) or 'GPU'} on this machine\n"
            f"  there is: {', '.join(f'cuda:{i}' for i in range(num_gpus)) or 'no GPU'}\n"
            "  next: `tune doctor`"
        )
    return Chosen(tuple(f"cuda:{number}" for number in numbers))


def _parts(numbers: list[int]) -> Chosen:
    """Return equal parts of the cores that this process may use, as many as are named."""
    usable = sorted(os.sched_getaffinity(0))
    each = len(usable) // len(numbers)
    if sorted(numbers) != list(range(len(numbers))) or not each:
        raise DeviceError(
            f"--devices: got {','.join(map(str, numbers))} for {len(usable)} cores\n"
            "  expected: 0,1 for two halves of its cores, 0,1,2 for three parts, and so on"
        )
    cores = {f"cpu:{n}": tuple(usable[n * each : (n + 1) * each]) for n in numbers}
    return Chosen(tuple(cores), cores)


@contextmanager
def kept_to(chosen: Chosen | None) -> Iterator[None]:
    """Keep this thread, and all that it starts, to the part of the processor that leads.

    So that the run is planned for that part, and its finalists are raced on it. Processes are
    then forked by a server that was started here, which the variables tell from others.
    """
    if chosen is None or not chosen.cores:
        yield
        return
    cores, before = chosen.cores[chosen.names[0]], os.sched_getaffinity(0)
    variables = {THREADS: str(len(cores)), CORES: ",".join(map(str, cores))}
    variables_before = {name: os.environ.get(name) for name in variables}
    os.sched_setaffinity(0, cores)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for name, value in variables_before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
