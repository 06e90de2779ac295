"""What a run's candidates are screened on: one device, several, or a cluster's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from tuner.evaluate.contender import QUIET
from tuner.evaluate.evaluator import Devices
from tuner.evaluate.runner import Runner, Terms
from tuner.fleet.certificates import TUNER, checked_certificate, knock
from tuner.fleet.chosen import Chosen, chosen_devices, kept_to
from tuner.fleet.cluster import dask_fleet
from tuner.fleet.devices import FleetDevices
from tuner.fleet.fleet import Fleet
from tuner.fleet.local import local_fleet
from tuner.fleet.screener import Screener
from tuner.kernel.builder import Builder
from tuner.planning.planning import Planned

__all__ = ["Cluster", "Host", "Screened", "Source", "source_of"]

PATIENCE_S = 120.0  # without any device of a cluster
MOST_DEVICES = 256  # of a cluster; a thread waits for each candidate that is screened


@dataclass(frozen=True, slots=True)
class Screened:
    """What devices are to screen; what becomes of them is reported to `on_change`."""

    planned: Planned
    run: str
    terms: Terms
    builder: Builder
    on_change: Callable[[str, str], None]


class Source:
    """Where a run's devices come from: the one that the run is planned for."""

    compiles_elsewhere: ClassVar[bool] = False

    def devices(self, of: Screened) -> Devices:
        """Return what screens the candidates of a run; it is not started yet."""
        builder = of.builder
        return Runner(of.planned.spec, of.terms, env=builder.environment, paused=builder.paused)

    def builders(self) -> Fleet | None:
        """Return what compiles candidates besides this host, if anything does."""
        return None


@dataclass(frozen=True, slots=True)
class Host(Source):
    """Several devices of this host."""

    chosen: Chosen

    def devices(self, of: Screened) -> Devices:
        """Return what screens the candidates of a run."""
        names, cores = self.chosen.names, self.chosen.cores

        def serve(name: str) -> Screener:
            # Of a processor's parts only the first one has the builders on it.
            is_apart = bool(cores) and name != names[0]
            paused = nullcontext if is_apart else of.builder.paused
            return Screener(self.chosen.torch_name(name), cores.get(name), paused)

        return FleetDevices(
            local_fleet(names, serve),
            of.run,
            of.planned.spec,
            of.terms,
            env=of.builder.environment,
            device=of.planned.device,
            num_devices=len(names),
            most=len(names),
            patience_s=0.0,  # none joins
            on_change=of.on_change,
        )


@dataclass(frozen=True, slots=True)
class Cluster(Source):
    """The devices of a cluster, those that join later too."""

    compiles_elsewhere: ClassVar[bool] = True
    address: str
    certificate: Path

    def devices(self, of: Screened) -> Devices:
        """Return what screens the candidates of a run."""
        return FleetDevices(
            dask_fleet(self.address, self.certificate),
            of.run,
            of.planned.spec,
            of.terms,
            env={},
            device=of.planned.device,
            num_devices=1,
            most=MOST_DEVICES,
            patience_s=PATIENCE_S,
            on_change=of.on_change,
        )

    def builders(self) -> Fleet | None:
        """Return the cluster's builders."""
        return dask_fleet(self.address, self.certificate, of_builders=True)


@contextmanager
def source_of(
    device: str, devices: str | None, cluster: str | None, certificate: Path | None
) -> Iterator[tuple[Source, str]]:
    """Find the devices that a user named; yield where they come from, and the one that leads.

    Args:
        device: of the config.
        devices: `all`, numbers such as `0,1`, or None for the one device of the config.
        cluster: address of a cluster, or None.
        certificate: the tuner's of that cluster, None for where it usually is.

    Raises:
        InputError, DeviceError: as `chosen_devices`; there is no certificate, or no scheduler.
    """
    if cluster is not None:
        file = checked_certificate(certificate, TUNER)
        knock(cluster, file)  # before anything is planned
        yield Cluster(cluster, file), device
        return
    if devices is None:
        yield Source(), device
        return
    chosen = chosen_devices(devices, device, QUIET)
    if len(chosen.names) == 1:
        yield Source(), chosen.torch_name(chosen.names[0])
        return
    with kept_to(chosen):
        yield Host(chosen), chosen.torch_name(chosen.names[0])
