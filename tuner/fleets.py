"""What a run's candidates are screened on: one device, several, or a cluster's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from tuner.evaluate.contender import QUIET
from tuner.evaluate.evaluator import Devices
from tuner.evaluate.runner import Runner, Terms
from tuner.fleet.chosen import Chosen, chosen_devices, kept_to
from tuner.fleet.devices import FleetDevices
from tuner.fleet.local import local_fleet
from tuner.fleet.screener import Screener
from tuner.kernel.builder import Builder
from tuner.planning import Planned

__all__ = ["Host", "OneDevice", "Source", "source_of"]


class Source(Protocol):
    """Where a run's devices come from."""

    def devices(
        self,
        planned: Planned,
        run: str,
        terms: Terms,
        builder: Builder,
        on_change: Callable[[str, str], None],
    ) -> Devices:
        """Return what screens the candidates of a run; it is not started yet."""


class OneDevice:
    """The device that the run is planned for."""

    def devices(
        self,
        planned: Planned,
        run: str,
        terms: Terms,
        builder: Builder,
        on_change: Callable[[str, str], None],
    ) -> Devices:
        """Return what screens the candidates of a run."""
        env = builder.environment
        return Runner(planned.task, terms, env=env, paused=builder.paused)


@dataclass(frozen=True, slots=True)
class Host:
    """Several devices of this host."""

    chosen: Chosen

    def devices(
        self,
        planned: Planned,
        run: str,
        terms: Terms,
        builder: Builder,
        on_change: Callable[[str, str], None],
    ) -> Devices:
        """Return what screens the candidates of a run."""
        names, cores = self.chosen.names, self.chosen.cores

        def serve(name: str) -> Screener:
            # Parts of a processor are kept quiet while any of them works.
            paused = nullcontext if cores else builder.paused
            return Screener(self.chosen.torch_name(name), cores.get(name), paused)

        return FleetDevices(
            local_fleet(names, serve),
            run,
            planned.task,
            terms,
            env=builder.environment,
            device=planned.device,
            num_devices=len(names),
            most=len(names),
            paused=builder.paused,
            on_change=on_change,
        )


@contextmanager
def source_of(devices: str | None, device: str) -> Iterator[tuple[Source, str]]:
    """Find the devices that a user named; yield where they come from, and the one that leads.

    Args:
        devices: `all`, numbers such as `0,1`, or None for the one device of the config.
        device: of the config.

    Raises:
        InputError, DeviceError: as `chosen_devices`.
    """
    if devices is None:
        yield OneDevice(), device
        return
    chosen = chosen_devices(devices, device, QUIET)
    if len(chosen.names) == 1:
        yield OneDevice(), chosen.torch_name(chosen.names[0])
        return
    with kept_to(chosen):
        yield Host(chosen), chosen.torch_name(chosen.names[0])
