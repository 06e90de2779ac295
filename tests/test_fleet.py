"""Fleets: one contract for devices of this host and of a cluster, with real processes that die."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from fleet_service import Doubling
from tiny_operator import config_text, write_family

import tuner
from tuner.errors import DeviceError, InputError, TunerError
from tuner.evaluate.job_spec import JobSpec
from tuner.evaluate.runner import Terms
from tuner.fleet import certificates
from tuner.fleet.agent import Agent
from tuner.fleet.anchors import Anchors, Off
from tuner.fleet.builders import FleetBuilders
from tuner.fleet.chosen import chosen_devices
from tuner.fleet.cluster import dask_fleet
from tuner.fleet.devices import FleetDevices
from tuner.fleet.dispatch import Dispatch, JobRaised, Opening
from tuner.fleet.fleet import AttemptLost, Fleet, Job, Joined, Lost, Reply
from tuner.fleet.local import local_fleet
from tuner.fleet.wire import Blobs, Garbled, digest_of
from tuner.kernel.builder import Builder
from tuner.kernel.toolchain import Toolchain
from tuner.kernel.triton_files import KERNELS_FILE, pack, unpack
from tuner.machine.datasheets import known_device
from tuner.machine.limits import limits_of
from tuner.plans import Argument, Plan, Step, Tensor
from tuner.trial import (
    Build,
    Candidate,
    Language,
    Measurement,
    Outcome,
    Status,
    Trial,
    to_json,
)

NUM_DEVICES = 3
LONG_S = 60.0  # that no job takes, however busy the machine is
HALVES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="two parts of a processor need two cores"
)


def wait_for(is_so: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s, "it did not happen"
        time.sleep(0.01)


class Bench:
    """A fleet under a dispatcher, and what became known of its devices."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.changes: list[tuple[str, str]] = []
        self.pids: dict[str, int] = {}  # of what a device runs its jobs in, at first
        self.dies_whole = False  # whether an agent is a process of its own, which is killed
        self.agents: dict[str, int] = {}
        self.blobs = folder / "blobs"  # of the agents

    def begin(self, fleet: Fleet, **options: object) -> Dispatch:
        def opened(name: str, reply: dict) -> str:
            self.pids[name], self.agents[name] = reply["pid"], reply["agent"]
            return ""

        opening = Opening(
            lambda name: {"folder": str(self.folder)}, limit_s=LONG_S, refusal=opened
        )
        self.dispatch = Dispatch(
            fleet,
            "a-run",
            opening,
            on_change=lambda device, words: self.changes.append((device, words)),
            patience_s=1.0,
            **options,
        )
        return self.dispatch

    def doubles(self, numbers: range, seconds: float = 0.01, limit_s: float = LONG_S, **more):
        return [
            self.dispatch.call("double", {"value": n, "seconds": seconds, **more}, limit_s=limit_s)
            for n in numbers
        ]

    def journal(self, what: str) -> list[int]:
        journal = self.folder / "journal"
        lines = journal.read_text().splitlines() if journal.exists() else []
        return [int(line.split()[3]) for line in lines if line.split()[2] == what]

    def running(self, number: int, attempt: int = 1) -> tuple[str, int]:
        """Wait until that many devices began with a number; return the last, and its process."""
        wait_for(lambda: self.journal("begin").count(number) >= attempt)
        lines = [line.split() for line in (self.folder / "journal").read_text().splitlines()]
        device, pid = [(w[1], w[4]) for w in lines if w[2:4] == ["begin", str(number)]][-1]
        return device, self.agents[device] if self.dies_whole else int(pid)


def said_by(process: subprocess.Popen[str], what: str) -> str:
    """Return the line that says it, of those that a process prints."""
    for line in process.stdout:
        if what in line:
            return line
    raise AssertionError(f"it ended without saying {what!r}")


class Cluster:
    """A scheduler on this host with its certificates, and processes that join it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.num = 0
        self.pids: list[int] = []
        start = ["cluster", "start", "--host", "127.0.0.1", "--port", "0"]
        self.scheduler = subprocess.Popen(
            [sys.executable, "-m", "tuner", *start, "--certificates", folder / "certificates"],
            stdout=subprocess.PIPE,
            text=True,
        )
        self.host = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "cluster_host.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.joining = said_by(self.scheduler, "tune worker").split()  # the line to join with
        self.address = self.joining[2]

    def certificate(self, name: str) -> Path:
        return self.folder / "certificates" / name

    def start(self, certificate: str | Path, **more: str) -> tuple[int, Path]:
        """Start an agent; return its process, and the file that it writes to."""
        self.num += 1
        ready = self.folder / f"ready-{self.num}"
        what = {"certificate": str(self.certificate("") / certificate), **more}
        self.host.stdin.write(json.dumps({**what, "ready": str(ready)}) + "\n")
        self.host.stdin.flush()
        self.pids.append(int(self.host.stdout.readline()))
        return self.pids[-1], ready

    def agent(self, name: str, **more: str) -> tuple[int, Path]:
        what = {"address": self.address, "name": name, "blobs": str(self.folder / "blobs")}
        what["serves"] = "doubling"
        return self.start(certificates.AGENTS, **{**what, **more})

    def said(self, ready: Path) -> str:
        wait_for(ready.exists)
        return ready.read_text()

    def end(self, pids: Sequence[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.end([*self.pids, self.scheduler.pid])
        self.host.stdin.close()
        for process in (self.host, self.scheduler):
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("distributed", reason="needs the extra tuner[cluster]")
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.close()


@pytest.fixture
def bench_of_cluster(tmp_path: Path, cluster: Cluster) -> Iterator[Bench]:
    agents = [cluster.agent(f"{tmp_path.name}:{n}") for n in range(NUM_DEVICES)]
    assert {cluster.said(ready) for _, ready in agents} == {"ready"}
    bench = Bench(tmp_path)
    bench.dies_whole = True
    bench.blobs = cluster.folder / "blobs"
    bench.begin(dask_fleet(cluster.address, cluster.certificate(certificates.TUNER)))
    bench.dispatch.wait_for_devices(NUM_DEVICES, LONG_S)
    yield bench
    bench.dispatch.close()
    cluster.end([pid for pid, _ in agents])


@pytest.fixture
def bench_of_host(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    names = [f"local:{n}" for n in range(NUM_DEVICES)]
    bench.begin(local_fleet(names, Doubling, Blobs(bench.blobs)))
    bench.dispatch.wait_for_devices(NUM_DEVICES, LONG_S)
    yield bench
    bench.dispatch.close()


@pytest.fixture(params=["host", "cluster"])
def bench(request: pytest.FixtureRequest) -> Bench:
    found: Bench = request.getfixturevalue(f"bench_of_{request.param}")
    return found


# ---- the contract -----------------------------------------------------------------------------


def test_every_job_is_done_once_by_any_device(bench):
    results = [future.result(LONG_S) for future in bench.doubles(range(30))]
    assert [r["value"] for r in results] == [2 * n for n in range(30)]
    assert sorted(bench.journal("end")) == list(range(30))
    assert {r["on"] for r in results} == set(bench.dispatch.devices)


def test_what_devices_are_killed_with_is_done_by_others_once(bench):
    futures = bench.doubles(range(40), seconds=0.05)
    for number in (5, 15):
        os.kill(bench.running(number)[1], signal.SIGKILL)
    results = [future.result(LONG_S)["value"] for future in futures]
    assert results == [2 * n for n in range(40)], "none is lost, none is blamed"
    assert len(bench.dispatch.devices) >= NUM_DEVICES - 2


def test_a_late_reply_is_dropped_and_its_device_works_again(bench):
    first = bench.doubles(range(1), seconds=0.2, limit_s=1.0)
    slow, pid = bench.running(0)
    os.kill(pid, signal.SIGSTOP)
    assert first[0].result(LONG_S)["on"] != slow, "another device does it"
    wait_for(lambda: any("no answer within 1 s" in words for _, words in bench.changes))
    dropped = bench.dispatch.num_dropped
    os.kill(pid, signal.SIGCONT)
    wait_for(lambda: bench.dispatch.num_dropped > dropped)
    wait_for(lambda: slow in bench.dispatch.devices)
    results = [future.result(LONG_S)["value"] for future in bench.doubles(range(9))]
    assert results == [2 * n for n in range(9)]


def test_a_job_that_device_after_device_is_lost_with_is_given_up(bench):
    (future,) = bench.doubles(range(7, 8), seconds=30.0)
    for attempt in range(1, 4):
        os.kill(bench.running(7, attempt)[1], signal.SIGKILL)
    with pytest.raises(AttemptLost, match=r"^lost 3 times with the device"):
        future.result(LONG_S)


def test_what_a_job_raises_is_reported_and_the_device_works_on(bench):
    with pytest.raises(JobRaised, match="ValueError: no"):
        bench.dispatch.call("raise", {"is_gone": False}, limit_s=LONG_S).result(LONG_S)
    assert len(bench.dispatch.devices) == NUM_DEVICES


def test_a_device_that_is_gone_is_left_and_the_last_one_ends_the_work(bench):
    futures = [bench.dispatch.call("raise", {"is_gone": True}, limit_s=LONG_S)]
    with pytest.raises(AttemptLost, match="the device is gone"):
        futures[0].result(LONG_S)
    assert bench.dispatch.devices == []
    with pytest.raises(DeviceError, match=r"no device of the fleet is left\n  next: `tune --resu"):
        bench.doubles(range(1))[0].result(LONG_S)


def test_files_are_there_beside_a_job(bench):
    file = bench.folder / "some.txt"
    file.write_text("what it says")
    call = bench.dispatch.call("read", {"name": "x.txt"}, {"x.txt": file}, limit_s=LONG_S)
    assert call.result(LONG_S)["text"] == "what it says"


def test_files_that_a_job_made_are_fetched_or_refused_by_their_digest(bench):
    payload = {"text": "what it made", "blobs": str(bench.blobs)}
    made = bench.dispatch.call("make", payload, limit_s=LONG_S).result(LONG_S)
    assert bench.dispatch.fetch(made["on"], made["digest"], LONG_S) == b"what it made"
    with pytest.raises(AttemptLost, match="is not here"):
        bench.dispatch.fetch(made["on"], digest_of(b"nobody made it"), LONG_S)
    (bench.blobs / made["digest"]).write_bytes(b"damaged")
    with pytest.raises(AttemptLost, match="is damaged"):
        bench.dispatch.fetch(made["on"], made["digest"], LONG_S)


def test_closing_ends_what_runs_and_leaves_no_process(bench):
    futures = bench.doubles(range(12), seconds=30.0)
    wait_for(lambda: len(bench.journal("begin")) == NUM_DEVICES)
    bench.dispatch.close()
    assert not wait(futures, LONG_S).not_done
    for future in futures:
        with pytest.raises(DeviceError, match="closed"):
            future.result()
    wait_for(lambda: not any(is_alive(pid) for pid in bench.pids.values()))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- clusters only -----------------------------------------------------------------------------


def test_an_agent_that_dies_between_finishing_and_delivering_leaves_nobody_waiting(
    bench_of_cluster,
):
    bench = bench_of_cluster
    futures = bench.doubles(range(6), dies=True)
    assert [future.result(LONG_S)["value"] for future in futures] == [2 * n for n in range(6)]
    ended = sorted(bench.journal("end"))
    assert len(ended) == 7 and set(ended) == set(range(6)), "one was done twice, and reported once"
    assert len(bench.dispatch.devices) == NUM_DEVICES - 1


def test_a_device_that_joins_late_is_given_work(bench_of_cluster, cluster, tmp_path):
    bench = bench_of_cluster
    pid, ready = cluster.agent(f"{tmp_path.name}:late")
    assert cluster.said(ready) == "ready"
    wait_for(lambda: len(bench.dispatch.devices) == NUM_DEVICES + 1)
    results = [future.result(LONG_S) for future in bench.doubles(range(20), seconds=0.05)]
    assert f"{tmp_path.name}:late" in {result["on"] for result in results}
    cluster.end([pid])


def test_who_has_certificates_of_another_start_is_refused(cluster, tmp_path):
    certificates.make(tmp_path)
    _, ready = cluster.start(
        tmp_path / certificates.AGENTS,
        address=cluster.address,
        name="stranger",
        serves="doubling",
        blobs=str(tmp_path / "blobs"),
    )
    assert cluster.said(ready).startswith(f"DeviceError: {cluster.address}: no scheduler answers")
    with pytest.raises(DeviceError, match="take address and certificate from the cluster's last"):
        dask_fleet(cluster.address, tmp_path / certificates.TUNER)


def test_what_is_not_encrypted_is_refused(cluster):
    plain = cluster.address.replace("tls://", "tcp://")
    with pytest.raises(InputError, match="expected: tls://HOST:PORT"):
        dask_fleet(plain, cluster.certificate(certificates.TUNER))
    host, port = plain.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:  # as a client without TLS
        connection.sendall(b"\0" * 64)
        connection.settimeout(LONG_S)
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(64)
            assert not answer or answer[0] == 21, "at most TLS's own alert"


def test_a_host_joins_by_the_line_that_the_cluster_printed_and_leaves_at_ctrl_c(cluster):
    assert cluster.joining[:2] == ["tune", "worker"]
    options = ["--device", "cpu", "--devices", "0", "--builders", "2", "--name", "here"]
    command = [sys.executable, "-m", "tuner", *cluster.joining[1:3], *options]
    process = subprocess.Popen(
        [*command, "--certificate", cluster.certificate(cluster.joining[-1])],
        stdout=subprocess.PIPE,
        text=True,
        # What runs in the background of a shell ignores it, and so do its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    joined = {said_by(process, "joined").split("#")[0] for _ in range(2)}
    assert joined == {"here/cpu:0", "here"}
    agents = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    assert process.wait(LONG_S) == 130
    process.stdout.close()
    wait_for(lambda: not any(is_alive(agent.pid) for agent in agents))


def test_certificates_are_readable_by_their_owner_alone(tmp_path):
    pytest.importorskip("cryptography", reason="needs the extra tuner[cluster]")
    certificates.make(tmp_path)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_blobs_are_what_their_names_say(tmp_path):
    blobs = Blobs(tmp_path)
    digest = digest_of(b"code")
    assert blobs.missing([digest]) == [digest]
    with pytest.raises(Garbled, match="is not"):
        blobs.add(digest, b"other code")
    blobs.add(digest, b"code")
    assert blobs.missing([digest]) == []
    assert blobs.placed({"a.so": digest})["a.so"].read_bytes() == b"code"
    with pytest.raises(Garbled, match="not the name of a file"):
        blobs.placed({"../a.so": digest})
    (tmp_path / digest).write_bytes(b"damaged")
    with pytest.raises(Garbled, match="is damaged"):
        blobs.placed({"b.so": digest})


# ---- builders of other hosts --------------------------------------------------------------------

CPP = 'extern "C" const char* add(float* y) { y[0] += %s; return nullptr; }\n'
# A compiler that says when it began, and takes its time; what it says of itself is c++'s.
SLOW_COMPILER = """#!/bin/sh
case "$1" in --version|-E|-march*-E) exec c++ "$@";; esac
echo begun >> {journal}
sleep {seconds}
c++ "$@" || exit
echo done >> {journal}
"""


class Hosts:
    """Two hosts with caches of their own that lend builders, and a parent with none of its own."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.said: list[tuple[str, str]] = []
        self.pids: dict[str, int] = {}

    def lend(self, name: str, num_builders: int = 2, seconds: float = 0.0, **env: str) -> None:
        folder = self.folder / name
        folder.mkdir()
        compiler = folder / "slow-g++"
        journal = self.journal(name)
        compiler.write_text(SLOW_COMPILER.format(journal=journal, seconds=seconds))
        compiler.chmod(0o755)
        self.pids[name], ready = self.cluster.agent(
            self.full(name),
            serves="compiling",
            cache=str(folder / "cache"),
            blobs=str(folder / "blobs"),
            num_builders=num_builders,
            env={"CXX": str(compiler), **env},
        )
        assert self.cluster.said(ready) == "ready"

    def full(self, name: str) -> str:
        return f"{self.folder.name}/{name}"

    def journal(self, name: str) -> Path:
        return self.folder / name / "journal"

    def count(self, name: str, what: str) -> int:
        journal = self.journal(name)
        return journal.read_text().split().count(what) if journal.exists() else 0

    @contextlib.contextmanager
    def parent(
        self,
        cache: str,
        names: Sequence[str],
        toolchain: Toolchain | None = None,
        languages: Sequence[Language] = ("cpp",),
        triton_sizes: Sequence[dict[str, int]] = (),
    ) -> Iterator[Builder]:
        """Yield a builder whose own compilers are busy, once the hosts are known."""
        toolchain = toolchain or Toolchain.find("cpu")
        fleet = dask_fleet(
            self.cluster.address, self.cluster.certificate(certificates.TUNER), of_builders=True
        )
        builders = FleetBuilders(
            fleet, "a-run", toolchain, languages, timeout_s=LONG_S, triton_sizes=triton_sizes,
            on_change=lambda name, words: self.said.append((name, words)),
        )  # fmt: skip
        with Builder(
            toolchain, self.folder / cache, num_workers=1, elsewhere=builders,
            triton_sizes=triton_sizes,
        ) as builder:  # fmt: skip
            ended = ("ready", "left out")
            reported = {self.full(name) for name in names}
            wait_for(lambda: reported <= {n for n, words in self.said if words.startswith(ended)})
            builder._here.acquire()
            yield builder


@pytest.fixture
def hosts(cluster: Cluster, tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(cluster, tmp_path)
    yield hosts
    cluster.end(list(hosts.pids.values()))


def added(number: int) -> Candidate:
    return Candidate("op", "t", {}, "cpp", CPP % number, Plan("op", (), (), (), ()))


def test_a_second_host_compiles_nothing_that_the_first_one_has(hosts):
    hosts.lend("a")
    candidates = [added(n) for n in range(3)]
    with hosts.parent("parent-1", ["a"]) as builder:
        builds = [builder.submit(c).result(LONG_S) for c in candidates]
        assert builder.at_once == 3
    assert {build.host for build in builds} == {hosts.full("a")}
    assert hosts.count("a", "done") == 3
    hosts.lend("b", num_builders=8)
    with hosts.parent("parent-2", ["a", "b"]) as builder:
        again = [builder.submit(c).result(LONG_S) for c in candidates]
        other = builder.submit(added(9)).result(LONG_S)
    assert hosts.count("a", "done") + hosts.count("b", "done") == 4, "the other one alone"
    assert other.status is Status.CORRECT
    for build, found in zip(builds, again, strict=True):
        assert (found.key, found.binary_key) == (build.key, build.binary_key)
        assert Path(found.artefact).read_bytes() == Path(build.artefact).read_bytes()
        assert Path(found.artefact).is_relative_to(hosts.folder / "parent-2")
    with Builder(Toolchain.find("cpu"), hosts.folder / "parent-2", num_workers=1) as builder:
        assert builder.submit(candidates[0]).result(LONG_S).is_cached, "it is in the cache, whole"


def test_a_host_of_builders_that_is_killed_while_compiling_costs_nothing_but_time(hosts):
    hosts.lend("a", seconds=0.3)
    hosts.lend("b")
    with hosts.parent("parent", ["a", "b"]) as builder:
        futures = [builder.submit(added(n)) for n in range(4)]
        wait_for(lambda: hosts.count("a", "begun") > 0)
        os.kill(hosts.pids["a"], signal.SIGKILL)
        builds = [future.result(LONG_S) for future in futures]
        assert {build.status for build in builds} == {Status.CORRECT}
        assert {build.host for build in builds} == {hosts.full("b")}
        os.kill(hosts.pids["b"], signal.SIGKILL)
        wait_for(lambda: builder.at_once == 1)
        builder._here.release()
        alone = builder.submit(added(7)).result(LONG_S)
        assert alone.status is Status.CORRECT and not alone.host, "this host does the rest"
        builder._here.acquire()


def test_what_does_not_compile_elsewhere_says_why_here(hosts):
    hosts.lend("a")
    candidate = Candidate("op", "t", {}, "cpp", "no_such_thing;", Plan("op", (), (), (), ()))
    with hosts.parent("parent", ["a"]) as builder:
        build = builder.submit(candidate).result(LONG_S)
    assert build.status is Status.COMPILE and "no_such_thing" in build.error
    assert "no_such_thing" in Path(build.log).read_text() and build.host == hosts.full("a")


def test_a_host_that_compiles_otherwise_is_left_out_with_the_difference(hosts):
    hosts.lend("a", CPATH="/elsewhere")
    with hosts.parent("parent", ["a"]) as builder:
        assert builder.at_once == 1
    assert hosts.said == [
        (
            hosts.full("a"),
            "left out: it compiles otherwise than this host: "
            "variables CPATH, /elsewhere instead of none",
        )
    ]


TRITON = """
import triton
import triton.language as tl

@triton.jit
def doubled_kernel(x, y, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + places, 2.0 * tl.load(x + places, mask=places < n), mask=places < n)

def doubled(x, y, n):
    doubled_kernel[(triton.cdiv(n, 128),)](x, y, n, BLOCK=128)  # NOTE
"""
TRITON_PLAN = Plan(
    "op",
    (Argument("x", shape=("n",)),),
    (Tensor("y", ("n",)),),
    (),
    (Step("call", "doubled", ("x", "y", "n")),),
)


def doubled(note: str = "") -> Candidate:
    return Candidate("op", "t", {}, "triton", TRITON.replace("NOTE", note), TRITON_PLAN)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_that_triton_compiled_elsewhere_are_in_tritons_cache_here(hosts):
    hosts.lend("a")
    toolchain, sizes = Toolchain.find("cuda", 90, ["triton"]), [{"n": 1024}, {"n": 257}]
    with hosts.parent("parent", ["a"], toolchain, ["triton"], sizes) as builder:
        built = builder.submit(doubled()).result(LONG_S)
        bad = Candidate("op", "t", {}, "triton", TRITON.replace("2.0 *", "2.0 +* "), TRITON_PLAN)
        broken = builder.submit(bad).result(LONG_S)
    assert (built.status, built.host) == (Status.CORRECT, hosts.full("a"))
    assert len(built.kernels) == 2 and Path(built.artefact).read_text() == doubled().source
    assert broken.status is Status.COMPILE and broken.host == hosts.full("a")
    cache = hosts.folder / "parent" / "triton"
    found = {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")}
    assert len(found) == 2
    (hosts.folder / "a" / "cache").rename(hosts.folder / "gone")
    with Builder(toolchain, cache.parent, num_workers=1, triton_sizes=sizes) as builder:
        again = builder.submit(doubled("in other words")).result(LONG_S)
    assert not again.is_cached and again.binary_key == built.binary_key
    assert again.kernels == built.kernels
    left = {path: path.stat().st_mtime_ns for path in cache.rglob("*.cubin")}
    assert left == found, "Triton compiled nothing"


def test_a_host_with_another_triton_compiles_all_else(hosts):
    hosts.lend("a")
    toolchain = replace(Toolchain.find("cpu"), triton="0.1")
    with hosts.parent("parent", ["a"], toolchain, ["cpp", "triton"]) as builder:
        assert builder.submit(added(1)).result(LONG_S).host == hosts.full("a")
        here = builder.submit(doubled())
        builder._here.release()
        assert not here.result(LONG_S).host
        builder._here.acquire()
    words = [words for _, words in hosts.said]
    assert re.fullmatch(r"compiles all but Triton's kernels: Triton \S+ instead of 0\.1", words[0])
    assert words[1] == "ready"


def test_kernels_that_builds_share_are_placed_once_and_those_half_made_are_completed(tmp_path):
    made = tmp_path / "made" / "KEY"
    made.mkdir(parents=True)
    (made / "k.cubin").write_bytes(b"code")
    listed = {"child_paths": {"k.cubin": str(made / "k.cubin")}}
    (made / "__grp__k.json").write_text(json.dumps(listed))
    packed = tmp_path / KERNELS_FILE
    packed.write_bytes(pack([made]))
    cache = tmp_path / "cache"
    half = cache / "KEY"
    half.mkdir(parents=True)  # of a compiler that was killed
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: unpack(packed, cache), range(50)))
    found = json.loads((half / "__grp__k.json").read_text())
    assert found == {"child_paths": {"k.cubin": str(half / "k.cubin")}}
    assert (half / "k.cubin").read_bytes() == b"code"
    assert list(cache.iterdir()) == [half]


def test_a_file_that_is_no_part_of_tritons_cache_is_refused(tmp_path):
    for name in ("../outside/a.cubin", "a.cubin", "a/b/c.cubin", "/a/b.cubin", "../b.cubin"):
        with zipfile.ZipFile(tmp_path / KERNELS_FILE, "w") as file:
            file.writestr(name, b"code")
        with pytest.raises(ValueError, match="more than folders of Triton's cache"):
            unpack(tmp_path / KERNELS_FILE, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# ---- the parent and the agent, alone ------------------------------------------------------------


class Scripted:
    """A fleet whose events are a test's, to say what no real one says twice in the same way."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.events: list[Reply | Lost | Joined] = []

    def submit(self, job: Job) -> None:
        self.jobs.append(job)

    def event(self, timeout_s: float) -> Reply | Lost | Joined | None:
        if self.events:
            return self.events.pop(0)
        time.sleep(0.005)
        return None

    def cancel(self, device: str, number: int) -> None:
        pass

    def close(self) -> None:
        pass

    def answer(self, job: Job, **changes: object) -> None:
        fields = {
            "run": job.run, "epoch": job.epoch, "number": job.number, "attempt": job.attempt,
            "device": job.device, "data": {"pid": 1, "agent": 2, "value": "right"}, **changes,
        }  # fmt: skip
        self.events.append(Reply(**fields))


def test_only_the_first_reply_of_the_current_attempt_of_this_epoch_and_run_counts(tmp_path):
    fleet = Scripted()
    dispatch = Bench(tmp_path).begin(fleet)
    fleet.events.append(Joined("a"))
    wait_for(lambda: len(fleet.jobs) == 1)
    fleet.answer(fleet.jobs[0])
    future = dispatch.call("double", {}, limit_s=LONG_S)
    wait_for(lambda: len(fleet.jobs) == 2)
    job = fleet.jobs[1]
    fleet.events.append(Lost("a", "gone"))
    fleet.events.append(Joined("a"))
    wait_for(lambda: len(fleet.jobs) == 3)
    fleet.answer(fleet.jobs[2])
    wait_for(lambda: len(fleet.jobs) == 4)
    again = fleet.jobs[3]
    assert (again.number, again.attempt) == (job.number, job.attempt + 1)
    wrong = {"value": "wrong"}
    fleet.answer(again, data=wrong, epoch="an earlier one")
    fleet.answer(again, data=wrong, run="another")
    fleet.answer(again, data=wrong, device="b")
    fleet.answer(job, data=wrong)
    wait_for(lambda: dispatch.num_dropped == 4)
    assert not future.done()
    fleet.answer(again)
    fleet.answer(again, data=wrong)
    wait_for(lambda: dispatch.num_dropped == 5)
    assert future.result()["value"] == "right"
    dispatch.close()


def test_an_agent_refuses_jobs_of_another_epoch_than_it_was_opened_for(tmp_path):
    reported: list[Reply | Lost] = []
    agent = Agent("a", Doubling, lambda event, epoch: reported.append(event))
    payload = {"folder": str(tmp_path)}
    agent.submit(Job("run", "first", 1, 1, "a", "open", payload))
    agent.submit(Job("run", "second", 1, 1, "a", "double", {"value": 1, "seconds": 0.0}))
    wait_for(lambda: len(reported) == 2)
    assert reported[0].failure is None and reported[1].failure.kind == "Refused"
    agent.submit(Job("run", "second", 2, 1, "a", "open", payload))
    agent.submit(Job("run", "first", 2, 1, "a", "double", {"value": 1, "seconds": 0.0}))
    agent.submit(Job("run", "second", 3, 1, "a", "double", {"value": 4, "seconds": 0.0}))
    wait_for(lambda: len(reported) == 6)
    lost, opened, late, done = reported[2:]
    assert isinstance(lost, Lost) and "another" in lost.reason
    assert opened.failure is None and late.failure.kind == "Refused"
    assert done.data == {"value": 8}
    agent.close()


class Timed:
    """A device of which only PyTorch's time is known: 100 us, and 1 us more for each number."""

    def __init__(self, device: str) -> None:
        us = 100.0 + int(device.partition(":")[2])
        self.baseline = json.loads(to_json(Measurement(us, 0.001, (us,), is_cold=True)))
        self.facts = json.loads(to_json(known_device("NVIDIA H200"))) | {"power_limit_w": 700.0}
        if device == "cuda:3":
            self.facts["name"] = "NVIDIA H100"
        if device == "cuda:4":
            self.facts["power_limit_w"] = 500.0
        if device == "cuda:6":  # a limit that nobody tells is none
            del self.facts["power_limit_w"]

    def run(self, job, payload, files):
        if job == "screen":  # a candidate of half PyTorch's time, whatever the device
            time.sleep(0.05)  # so that others are asked meanwhile
            us = self.baseline["latency_us"]
            measured = Measurement(us / 2, 0.001, (us / 2,), is_cold=True, anchor_us=us)
            outcome = Outcome(Status.CORRECT, measurement=measured)
            assert (payload["best_us"], payload["lead_us"]) == (25.0, 100.0)
            return {"outcome": json.loads(to_json(outcome)), "waited_s": 0.0}
        return {"baseline": self.baseline, "device": self.facts}

    def close(self) -> None:
        pass


def test_devices_of_another_kind_or_speed_are_named_or_left_out(tmp_path):
    (tmp_path / "reference.py").touch()
    task = JobSpec(str(tmp_path / "reference.py"), {}, "cuda:0", "float32", "f", "[]", "")
    reported: dict[str, list[str]] = {}
    names = ["cuda:0", "cuda:2", "cuda:3", "cuda:4", "cuda:5", "cuda:6", "cuda:20"]
    devices = FleetDevices(
        local_fleet(names, Timed), "a-run", task, Terms(0.02, 0.01, True, 0), env={},
        device=known_device("NVIDIA H200"), num_devices=len(names), most=len(names),
        patience_s=0.0, on_change=lambda name, words: reported.setdefault(name, []).append(words),
    )  # fmt: skip
    assert devices.start().latency_us == 100.0
    assert devices.names == ["cuda:0", "cuda:2", "cuda:5", "cuda:6"] == list(devices.baselines_us)
    assert dict(devices.together_us) == dict(devices.baselines_us)
    assert reported["cuda:0"] == reported["cuda:2"] == ["ready"]
    assert "name NVIDIA H100 instead of NVIDIA H200" in reported["cuda:3"][0]
    assert reported["cuda:5"] == ["ready", "warning: PyTorch's time is 5 % off that on cuda:0"]
    assert "20 % off that on cuda:0: their times cannot be compared" in reported["cuda:20"][1]
    limited = "lost: it is limited otherwise than cuda:0: power_limit_w 500.0 instead of 700.0"
    assert reported["cuda:4"] == ["ready", limited]
    artefact = tmp_path / "artefact.so"
    artefact.touch()
    build = Build("key", Status.CORRECT, str(artefact), "log.txt")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(devices.screen, added(1), build, 25.0) for _ in range(8)]
        outcomes = [future.result(LONG_S) for future in asked]
    raw_us = {outcome.measurement.latency_us for outcome in outcomes}
    assert len(raw_us) > 1, "several devices did it"
    reported_us = {round(outcome.latency_us, 9) for outcome in outcomes}
    assert reported_us == {50.0}, "reported as cuda:0 would take it"
    devices.close()


def timed_at(us: float) -> Measurement:
    return Measurement(us, 0.001, (us,), is_cold=True)


def anchors_of(*us: float, leaves_out: bool = True) -> Anchors:
    alone = {f"cuda:{n}": timed_at(one) for n, one in enumerate(us)}
    anchors = Anchors(alone, leaves_out=leaves_out)
    assert anchors.worked_together(alone) == []
    return anchors


def noted(anchors: Anchors, name: str, *us: float) -> list[Off]:
    """Tell of one time after the other; return what was said."""
    said = [anchors.noted(name, one, anchors.alone_us) for one in us]
    return [off for off in said if off is not None]


def test_a_device_that_slows_down_is_named_once_and_then_left_out():
    anchors = anchors_of(100.0, 102.0)
    assert noted(anchors, "cuda:1", 104.0, 102.0, 500.0, 102.1) == [], "once is no change"
    (off,) = noted(anchors, "cuda:1", 107.1, 107.2, 107.3)
    assert not off.is_too_far
    assert off.words.startswith("PyTorch's time has moved by 5 % from that on the others")
    assert noted(anchors, "cuda:1", 108.0, 108.1) == [], "it is named already"
    assert noted(anchors, "cuda:1", 102.0, 102.1, 102.2) == []
    assert len(noted(anchors, "cuda:1", 107.1, 107.2)) == 1, "it was back meanwhile"
    (off,) = noted(anchors, "cuda:1", 117.1, 117.2)
    assert off.is_too_far
    assert not any(o.is_too_far for o in noted(anchors, "cuda:0", 100.1)), "it did not move"
    anchors.leave("cuda:1")
    assert noted(anchors, "cuda:0", 300.0, 301.0, 302.0) == [], "nothing to compare with is left"


def test_a_time_that_was_disturbed_makes_no_candidate_fast():
    """On a busy processor a baseline took 5000 us once, and all seemed five times as fast."""
    alone = {"cpu:0": timed_at(5000.0), "cpu:1": timed_at(1000.0)}
    anchors = Anchors(alone, leaves_out=False)
    anchors.worked_together({"cpu:0": timed_at(1000.0), "cpu:1": timed_at(980.0)})
    noted(anchors, "cpu:1", 4998.0)
    assert anchors.lead_us == anchors.to_lead("cpu:1") * 1000.0 == 1000.0
    noted(anchors, "cpu:1", 4999.0, 5001.0)
    assert anchors.to_lead("cpu:1") == 1 / 1.1, "no further than devices may differ"


def test_what_changes_on_all_devices_alike_is_no_difference():
    anchors = anchors_of(100.0, 101.0, 102.0)
    for times in (1.08, 1.081, 1.082):
        reported = [noted(anchors, f"cuda:{n}", times * (100.0 + n)) for n in range(3)]
    assert reported == [[], [], []]


def test_parts_of_a_processor_are_named_and_never_left_out():
    alone = {"cpu:0": timed_at(100.0), "cpu:1": timed_at(150.0)}
    anchors = Anchors(alone, leaves_out=False)
    (off,) = anchors.off_at_start()
    assert off.device == "cpu:1" and not off.is_too_far
    (slower,) = anchors.worked_together({"cpu:0": timed_at(130.0), "cpu:1": timed_at(150.0)})
    assert slower.words == "PyTorch takes 30 % longer while the other devices work"


def test_the_limits_of_a_gpu_are_what_nvidias_program_tells(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text('#!/bin/sh\n[ "$2" = GPU-1234 ] && echo "700.00, 1980, 3201, [N/A]"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = {"power_limit_w": 700.0, "max_clock_mhz": 1980.0, "max_memory_clock_mhz": 3201.0}
    assert limits_of("1234") == found == limits_of("GPU-1234")
    assert limits_of("5678") == {}


# ---- a run on several devices -------------------------------------------------------------------


@HALVES
def test_a_run_on_two_devices_is_stopped_and_goes_on_with_a_clusters(tmp_path, cluster):
    """One session on two halves of this processor, the next by two agents, one of which dies."""
    space = {"mode": ["ok", "segfault", "wrong", "raise"], "salt": [0, 1]}
    text = config_text(
        write_family(tmp_path / "families"), space=space, search={"sampler": "random"}
    )
    (tmp_path / "config.yaml").write_text(text)
    before = os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")
    reported: list[Trial] = []

    class Counting(tuner.Observer):
        def on_trial(self, trial: Trial, num_building: int) -> None:
            reported.append(trial)

    run = tuner.tune(
        tuner.load_config(tmp_path / "config.yaml"),
        runs_dir=tmp_path / "runs",
        observer=Counting(),
        should_stop=lambda: len(reported) >= 3,
        verifies=False,
        devices="0,1",
    )
    assert (os.sched_getaffinity(0), os.environ.get("OMP_NUM_THREADS")) == before
    first, environment = run.trials(), run.environment()
    assert len(first) >= 3 and [t.number for t in first] == list(range(len(first)))
    (session,) = environment.sessions
    assert set(session.devices) == {"cpu:0", "cpu:1"} == set(session.devices_together)
    timed = [t.outcome for t in first if t.outcome.latency_us]
    assert {outcome.device for outcome in timed} <= {"cpu:0", "cpu:1"}
    for outcome in timed:
        measured = outcome.measurement
        assert outcome.latency_us == measured.latency_us * measured.to_lead
        assert 1 / 1.1 <= measured.to_lead <= 1.1 and measured.anchor_us

    agents = {name: cluster.agent(name, serves="screening") for name in ("screens", "dies")}
    assert {cluster.said(ready) for _, ready in agents.values()} == {"ready"}

    class Killing(tuner.Observer):
        def on_run(self, *_: object) -> None:  # both are ready, and have nothing yet
            moment_s = random.uniform(0.0, 2.0)
            threading.Timer(moment_s, cluster.end, ([agents["dies"][0]],)).start()

    tuner.resume(
        run.path,
        verifies=False,
        observer=Killing(),
        cluster=cluster.address,
        certificate=cluster.certificate(certificates.TUNER),
    )
    cluster.end([pid for pid, _ in agents.values()])
    trials = run.trials()
    assert trials[: len(first)] == first, "what is recorded stays"
    assert len({tuple(t.params.items()) for t in trials}) == len(trials) == 8
    assert sorted(t.question for t in trials) == list(range(8)), "each question has one answer"
    assert run.environment().in_flight == environment.in_flight
    found = {t.params["mode"]: t.outcome for t in trials}
    assert found["ok"].latency_us and not found["wrong"].latency_us
    assert {t.outcome.device for t in trials[len(first) :]} <= {"screens", "dies"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1.5", "expected: all, or numbers such as 0,1"),
        ("0,0", "expected: each number once"),
        ("1", "expected: 0,1 for two halves of its cores"),
        (",".join(map(str, range(10_000))), "for two halves of its cores"),
    ],
)
def test_devices_that_cannot_be_are_refused_with_what_is_expected(text, reason):
    with pytest.raises(TunerError, match=reason):
        chosen_devices(text, "cpu", {})


@HALVES
def test_parts_of_a_processor_share_no_core():
    chosen = chosen_devices("0,1", "cpu", {})
    assert chosen.names == ("cpu:0", "cpu:1")
    one, other = (set(cores) for cores in chosen.cores.values())
    assert not one & other and len(one) == len(other)


def test_a_config_that_names_no_device_gets_parts_of_the_processor_where_no_gpu_is():
    chosen = chosen_devices("all", "auto", {"CUDA_VISIBLE_DEVICES": ""})
    assert chosen.names == ("cpu:0",) and len(chosen.cores) == 1
