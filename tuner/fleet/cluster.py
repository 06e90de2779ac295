"""The devices of a cluster as a fleet, by `distributed`: scheduler, agents, and the parent's end.

    parent  -- proxy: blobs, job -->  scheduler  -->  agent
            <-- events: replies, agents that join or leave --

Dask's own tasks are not used: a result would lie on the worker that made it, and be gone with it.
A job is a message to one worker; its reply, and a worker's end, are events that are pushed. All of
it is JSON text and bytes, over TLS in which both sides show a certificate of this cluster's start.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tuner.errors import DeviceError
from tuner.fleet.agent import Agent, Serve
from tuner.fleet.certificates import CONNECT_S, cluster_packages, knock, not_there
from tuner.fleet.fleet import AttemptLost, Event, Fleet, Job, Joined, Lost, Reply
from tuner.fleet.wire import Blobs, Garbled, digest_of, event_from, event_text, job_from, job_text

__all__ = ["dask_fleet", "require_free", "serve_agent", "serve_scheduler"]

BUILDERS = "tuner-builders"  # a resource of Dask's workers: those that lend builders have it
LOOK_EVERY_S = 0.2  # whether a fleet was closed, while a file is fetched
LEAVE_S = 2.0  # for agents to hear that the work is over
LOCAL = "127.0.0.1:0"  # of the HTTP servers that Dask insists on; nothing is served there
NUM_EVENTS_KEPT = 100  # of each topic on the scheduler: they were sent when they came


@contextlib.contextmanager
def _dask() -> Iterator[Any]:
    """Import `distributed`, and set what it reads: quiet, and no pages of its own.

    Raises:
        ToolchainError: it is not installed.
    """
    with cluster_packages():
        import dask
        import distributed
    logging.getLogger("distributed").setLevel(logging.CRITICAL + 1)  # what matters we say
    with dask.config.set(
        {
            "distributed.scheduler.http.routes": [],
            "distributed.worker.http.routes": [],
            "distributed.admin.low-level-log-length": NUM_EVENTS_KEPT,
            "distributed.comm.require-encryption": True,
        }
    ):
        yield distributed


def _security(distributed: Any, certificate: Path) -> Any:
    """Return what Dask needs of one file that holds a key, its certificate and the authority's."""
    path = str(certificate)
    roles = ("client", "scheduler", "worker")
    files = {f"tls_{role}_{what}": path for role in roles for what in ("cert", "key")}
    return distributed.Security(require_encryption=True, tls_ca_file=path, **files)


def require_free(host: str, port: int) -> None:
    """Raise a DeviceError unless a scheduler can listen there."""
    try:
        with socket.create_server((host, port)):
            pass
    except OSError as error:
        raise DeviceError(f"port {port}: {error}\n  next: name another --port") from error


def serve_scheduler(
    host: str, port: int, certificate: Path, on_ready: Callable[[str], None]
) -> None:
    """Run a cluster's scheduler until it is interrupted.

    Args:
        host: address to listen at, "" for all of this host's.
        port: 0 for any that is free.
        certificate: the scheduler's file.
        on_ready: called with the address for all others.

    Raises:
        DeviceError: the port is taken.
    """

    async def run() -> None:
        with _dask() as distributed:
            try:
                scheduler = distributed.Scheduler(
                    host=host or None,
                    port=port,
                    protocol="tls",
                    security=_security(distributed, certificate),
                    dashboard=False,
                    dashboard_address=LOCAL,
                )
                await scheduler
            except (OSError, RuntimeError) as error:  # distributed wraps one in the other
                why = error.__cause__ or error
                raise DeviceError(f"port {port}: {why}\n  next: name another --port") from error
            on_ready(scheduler.address)
            await scheduler.finished()

    asyncio.run(run())


def serve_agent(
    address: str,
    certificate: Path,
    name: str,
    serve: Serve,
    blobs: Path,
    on_ready: Callable[[], None] = lambda: None,
    num_builders: int = 0,
) -> None:
    """Run the agent of one device, or of a host's builders, until the scheduler is gone.

    Args:
        address: of the scheduler.
        certificate: the agents' file.
        name: of the device, unlike any other of the cluster.
        serve: what the agent can do.
        blobs: folder of files that jobs bring, shared by the agents of this host.
        on_ready: called when the scheduler knows it.
        num_builders: how many compile at a time; 0 for a device.

    Raises:
        InputError: the address is none.
        DeviceError: nobody is there, or it does not take the certificate.
    """
    knock(address, certificate)
    asyncio.run(
        _run_agent(address, certificate, name, serve, Blobs(blobs), on_ready, num_builders)
    )


async def _run_agent(
    address: str, certificate: Path, name: str, serve: Serve, blobs: Blobs,
    on_ready: Callable[[], None], num_builders: int,
) -> None:  # fmt: skip
    topics: dict[str, str] = {}  # by epoch

    def send(event: Reply | Lost, epoch: str) -> None:
        worker.log_event(topics[epoch], event_text(event))

    async def missing(digests: list[str]) -> list[str]:
        return blobs.missing(digests)

    async def blob(digest: str, data: bytes) -> str:
        return _said(lambda: blobs.add(digest, bytes(data)))

    async def fetch(digest: str) -> bytes:
        return await asyncio.to_thread(blobs.read, digest)

    async def job(text: str) -> str:
        def take() -> None:
            found, reply_to = job_from(text, blobs)
            topics[found.epoch] = reply_to
            agent.submit(found)

        return await asyncio.to_thread(_said, take)  # it may have to end what ran before

    async def cancel(number: int) -> str:
        agent.cancel(number)
        return ""

    async def leave(epoch: str) -> str:
        await asyncio.to_thread(agent.leave, epoch)
        return ""

    with _dask() as distributed, tempfile.TemporaryDirectory(prefix="tuner-agent-") as folder:
        agent = Agent(name, serve, send, max(1, num_builders))
        try:
            worker = distributed.Worker(
                address,
                name=name,
                nthreads=max(1, num_builders),
                resources={BUILDERS: num_builders} if num_builders else {},
                memory_limit=0,
                security=_security(distributed, certificate),
                dashboard_address=LOCAL,
                local_directory=folder,
            )
            handlers = {
                "missing": missing, "blob": blob, "job": job, "cancel": cancel, "leave": leave,
                "fetch": fetch,
            }  # fmt: skip
            worker.handlers.update({f"tuner_{op}": handler for op, handler in handlers.items()})
            try:
                await asyncio.wait_for(worker, CONNECT_S)
            except (OSError, TimeoutError, ValueError, RuntimeError) as error:
                raise DeviceError(not_there(address, certificate, error)) from error
            on_ready()
            await worker.finished()
        finally:
            agent.close()


def _said(do: Callable[[], None]) -> str:
    """Do something; return what is wrong with what was asked for, or nothing."""
    try:
        do()
    except Garbled as error:
        return str(error)
    return ""


class _ClusterFleet:
    def __init__(self, address: str, certificate: Path, *, of_builders: bool) -> None:
        self._of_builders = of_builders
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._addresses: dict[str, str] = {}  # by name of the device
        self._turns: dict[str, asyncio.Lock] = {}
        self._digests: dict[tuple[Path, int], str] = {}
        self._is_heard = threading.Event()
        self._epoch = ""  # of the jobs
        self._is_closed = False
        with _dask() as distributed:
            try:
                self._client = distributed.Client(
                    address,
                    security=_security(distributed, certificate),
                    set_as_default=False,
                    timeout=CONNECT_S,
                )
            except (OSError, TimeoutError, ValueError) as error:
                raise DeviceError(not_there(address, certificate, error)) from error
        self._topic = f"tuner-{self._client.id}"
        self._client.subscribe_topic("all", self._changed)
        self._client.subscribe_topic(self._topic, self._reported)
        end_s = time.monotonic() + CONNECT_S
        while not self._is_heard.wait(0.05):  # until events come: none may be missed
            if time.monotonic() > end_s:
                raise DeviceError(f"{address}: the scheduler sends no events")
            self._client.log_event(self._topic, "")
        self._run(self._look())

    def _run(self, coroutine: Any) -> concurrent.futures.Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._client.loop.asyncio_loop)

    # ---- what happens, in the client's thread ------------------------------------------------

    def _reported(self, event: tuple[float, Any]) -> None:
        self._is_heard.set()
        try:
            self._events.put(event_from(event[1]))
        except Garbled:  # our own first word, or nobody's
            return

    async def _changed(self, event: tuple[float, Any]) -> None:
        what = event[1]
        if what.get("action") == "add-worker":
            await self._look()
        elif what.get("action") == "remove-worker":
            for name, address in list(self._addresses.items()):
                if address == what["worker"]:
                    del self._addresses[name]
                    self._events.put(Lost(name, "its agent is gone"))

    async def _look(self) -> None:
        """Find the agents that are not known yet."""
        found = await self._client.scheduler.identity()
        for address, worker in found["workers"].items():
            name, lends_builders = worker["name"], BUILDERS in worker["resources"]
            if name not in self._addresses and lends_builders == self._of_builders:
                self._addresses[name] = address
                self._turns[name] = asyncio.Lock()
                self._events.put(Joined(name, worker["nthreads"]))

    # ---- what is asked -----------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        self._epoch = job.epoch
        self._run(self._deliver(job))

    async def _deliver(self, job: Job) -> None:
        try:
            digests, data = {}, {}
            for name, path in job.files.items():
                digests[name] = self._digest(path)
                data[digests[name]] = path
            async with self._turns[job.device]:  # in the order of asking
                if digests:
                    for digest in await self._ask(job.device, "missing", digests=list(data)):
                        await self._say(
                            job.device, "blob", digest=digest, data=data[digest].read_bytes()
                        )
                await self._say(job.device, "job", text=job_text(job, digests, self._topic))
        except Exception as error:  # whatever an agent, or Dask, raises: nobody may wait for it
            self._events.put(Lost(job.device, f"job {job.number} cannot be delivered: {error}"))

    def _digest(self, path: Path) -> str:
        key = path, path.stat().st_mtime_ns
        if key not in self._digests:
            self._digests[key] = digest_of(path.read_bytes())
        return self._digests[key]

    async def _say(self, device: str, op: str, **fields: Any) -> None:
        refused = await self._ask(device, op, **fields)
        if refused:
            raise ValueError(refused)

    async def _ask(self, device: str, op: str, **fields: Any) -> Any:
        message = {"op": f"tuner_{op}", **fields}
        return await self._client.scheduler.proxy(msg=message, worker=self._addresses[device])

    def event(self, timeout_s: float) -> Event | None:
        try:
            return self._events.get(timeout=timeout_s)
        except queue.Empty:
            if self._client.status == "closed":  # Dask has given the scheduler up
                for name in list(self._addresses):
                    del self._addresses[name]
                    self._events.put(Lost(name, "the scheduler is gone"))
            return None

    def cancel(self, device: str, number: int) -> None:
        async def say() -> None:
            if device in self._addresses:
                await self._ask(device, "cancel", number=number)

        self._run(say())

    def fetch(self, device: str, digest: str, timeout_s: float) -> bytes:
        asked = self._run(self._ask(device, "fetch", digest=digest))
        end_s = time.monotonic() + timeout_s
        try:
            while not asked.done() and time.monotonic() < end_s and not self._is_closed:
                concurrent.futures.wait([asked], LOOK_EVERY_S)
            data = bytes(asked.result(0.0))
        except Exception as error:  # whatever an agent, or Dask, raises
            asked.cancel()
            raise AttemptLost(f"{device} does not give {digest[:12]}...: {error}") from error
        if digest_of(data) != digest:
            raise AttemptLost(f"{device} gives other bytes than {digest[:12]}...")
        return data

    def close(self) -> None:
        self._is_closed = True  # who waits for a file need not
        if self._client.status == "running":
            with contextlib.suppress(concurrent.futures.TimeoutError):
                self._run(self._leave()).result(LEAVE_S)
            for topic in ("all", self._topic):
                self._client.unsubscribe_topic(topic)
        self._client.close()

    async def _leave(self) -> None:
        leaving = [self._ask(name, "leave", epoch=self._epoch) for name in self._addresses]
        await asyncio.gather(*leaving, return_exceptions=True)


def dask_fleet(address: str, certificate: Path, *, of_builders: bool = False) -> Fleet:
    """Return the devices of a cluster, or its builders.

    Args:
        address: of the scheduler, tls://HOST:PORT.
        certificate: the tuner's file.
        of_builders: which of both.

    Raises:
        InputError: the address is none.
        ToolchainError: `distributed` is not installed.
        DeviceError: nobody is there, or it does not take the certificate.
    """
    knock(address, certificate)
    return _ClusterFleet(address, certificate, of_builders=of_builders)
