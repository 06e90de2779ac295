from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import psutil
import pytest

from tuner.errors import StorageError, ToolchainError
from tuner.kernel.builder import Builder
from tuner.kernel.cache import default_cache_dir
from tuner.kernel.compiler_words import first_error, hash_code, parse_resources
from tuner.kernel.toolchain import CPP_FLAGS, Toolchain
from tuner.kernel.triton_files import TRITON_CACHE
from tuner.machine.vectors import vectors
from tuner.plans import Argument, Plan, Step, Tensor
from tuner.trial import Candidate, KernelResources, Status

# Compilers are nice: on a machine with other work one took a minute. Below the limit of a test.
BUILT_S = 240.0
HAS_NVCC = shutil.which("nvcc") is not None or Path("/usr/local/cuda/bin/nvcc").exists()
needs_nvcc = pytest.mark.skipif(not HAS_NVCC, reason="nvcc is not installed")

PLAN = Plan("op", (), (Tensor("y", ("n",)),), (), ())
CPP = """
#include <cstdint>
extern "C" const char* op_add(const float* x, float* y, int64_t n) {
    for (int64_t i = 0; i < n; ++i) y[i] = x[i] + NUMBER;
    return nullptr;
}
"""
CUDA = """
#include <cstdint>
#include <cuda_runtime.h>
namespace {
template <int N> __global__ void op_add_kernel(const float* x, float* y, int64_t n) {
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    if (threadIdx.x < n) y[threadIdx.x] = tile[255 - threadIdx.x] + N;  // NOTE
}
}
extern "C" const char* op_add(const float* x, float* y, int64_t n, void* stream) {
    op_add_kernel<NUMBER><<<1, 256, 0, static_cast<cudaStream_t>(stream)>>>(x, y, n);
    return cudaGetErrorString(cudaGetLastError());
}
"""


def cpp(number="1", text=CPP, **changes):
    source = text.replace("NUMBER", str(number))
    return dataclasses.replace(Candidate("op", "t", {}, "cpp", source, PLAN), **changes)


def cuda(number="1", text=CUDA):
    return Candidate("op", "t", {}, "cuda", text.replace("NUMBER", str(number)), PLAN)


@pytest.fixture(scope="session")
def gcc():
    return Toolchain.find("cpu")


@pytest.fixture(scope="session")
def nvcc():
    return Toolchain.find("cuda", 90)


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def builder(gcc, cache):
    with Builder(gcc, cache, num_workers=2) as builder:
        yield builder


def build(toolchain, cache, candidate, **options):
    with Builder(toolchain, cache, num_workers=1, **options) as builder:
        return builder.submit(candidate).result(BUILT_S)


def leftovers(cache):
    return [path.name for path in cache.iterdir() if path.name.startswith(".tmp")]


def fake(tmp_path, script, **changes):
    """A toolchain whose C++ compiler is a shell script."""
    path = tmp_path / "fake-g++"
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return Toolchain(kind="cpu", host_compiler=str(path), **changes)


def wait_until(claim, wait_s=60.0):
    deadline = time.monotonic() + wait_s
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.01)
    return claim()


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class InterruptedCondition(threading.Condition):
    """Where Ctrl-C comes between the lock and the body of `with`."""

    is_interrupted = False

    def __enter__(self):
        super().__enter__()
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        return True


@pytest.mark.timeout(60)
def test_ctrl_c_between_a_lock_and_its_body_does_not_stop_the_end(tmp_path, cache):
    with Builder(fake(tmp_path, "sleep 100"), cache, num_workers=1) as builder:
        builder._change = InterruptedCondition()
        future = builder.submit(cpp())
        assert wait_until(lambda: builder._groups)
        builder._change.is_interrupted = True
        with pytest.raises(KeyboardInterrupt):
            _ = builder.pending
    assert future.cancelled() or isinstance(future.exception(0), CancelledError)


# ---- C++ ------------------------------------------------------------------------------------


def test_good_text_becomes_a_library_that_computes(builder, cache):
    candidate = cpp(3)
    built = builder.submit(candidate).result(BUILT_S)
    assert built.status is Status.CORRECT
    assert not built.is_cached
    assert built.seconds > 0
    assert built.kernels == ()
    folder = Path(built.artefact).parent
    assert folder == cache / built.key == cache / builder.key(candidate)
    assert sorted(p.name for p in folder.iterdir()) == [
        "artefact.so",
        "build.json",
        "log.txt",
        "source.cpp",
    ]
    assert (folder / "source.cpp").read_text() == candidate.source
    x, y = (ctypes.c_float * 2)(1, 2), (ctypes.c_float * 2)()
    function = ctypes.CDLL(built.artefact).op_add
    function.restype = ctypes.c_char_p
    assert function(x, y, ctypes.c_int64(2)) is None
    assert list(y) == [4, 5]
    assert not leftovers(cache)


def test_syntax_error_names_line_and_reason_and_is_kept(builder, gcc, cache):
    candidate = cpp("undeclared_name")
    built = builder.submit(candidate).result(BUILT_S)
    assert built.status is Status.COMPILE
    assert built.artefact is None
    assert built.error.startswith("source.cpp:4:")
    assert "error: " in built.error
    assert "undeclared_name" in built.error
    assert built.error in Path(built.log).read_text()
    again = build(gcc, cache, candidate)
    assert again.is_cached
    assert again.error == built.error


def test_warnings_stay_in_the_log(builder):
    text = CPP + "#warning mind the step\n"
    built = builder.submit(cpp(text=text)).result(BUILT_S)
    assert built.status is Status.CORRECT
    assert "mind the step" in Path(built.log).read_text()


def test_missing_symbol_is_a_build_error_not_a_load_error(builder):
    text = 'extern "C" int missing(int);\nextern "C" int op(int x) { return missing(x); }\n'
    built = builder.submit(cpp(text=text)).result(BUILT_S)
    assert built.status is Status.COMPILE
    assert "undefined reference to `missing'" in built.error


def test_openmp_and_nan_semantics_are_on(builder):
    text = """
#include <cmath>
extern "C" int threads_macro() { return _OPENMP; }
extern "C" int is_nan(double x) { return std::isnan(x) && !(x == x); }
"""
    built = builder.submit(cpp(text=text)).result(BUILT_S)
    library = ctypes.CDLL(built.artefact)
    assert library.threads_macro() > 200000
    assert library.is_nan(ctypes.c_double(float("nan"))) == 1
    assert library.is_nan(ctypes.c_double(1.0)) == 0


# ---- the cache ------------------------------------------------------------------------------


def test_second_builder_finds_the_build_much_faster(gcc, cache):
    first = build(gcc, cache, cpp())
    second = build(gcc, cache, cpp())
    assert not first.is_cached
    assert second.is_cached
    assert second.seconds < first.seconds / 3
    assert first.started_at <= first.ended_at <= second.started_at <= second.ended_at
    assert first.builder == second.builder == 0
    times = {"seconds": 0, "started_at": "", "ended_at": ""}
    assert dataclasses.replace(second, is_cached=False, **times) == dataclasses.replace(
        first, **times
    )


def test_same_candidate_is_the_same_future(builder):
    assert builder.submit(cpp(1)) is builder.submit(cpp(1))
    assert builder.submit(cpp(2)) is not builder.submit(cpp(1))


def test_moved_cache_still_works(gcc, cache, tmp_path):
    build(gcc, cache, cpp())
    moved = cache.rename(tmp_path / "elsewhere")
    built = build(gcc, moved, cpp())
    assert built.is_cached
    assert Path(built.artefact).is_relative_to(moved)
    assert Path(built.log).is_file()


def test_deleted_entry_is_rebuilt_by_the_same_builder(builder):
    first = builder.submit(cpp()).result(BUILT_S)
    shutil.rmtree(Path(first.artefact).parent)
    second = builder.submit(cpp()).result(BUILT_S)
    assert not second.is_cached
    assert Path(second.artefact).is_file()


def damage_library(folder):
    code = bytearray((folder / "artefact.so").read_bytes())
    code[-1] ^= 1
    (folder / "artefact.so").write_bytes(code)


def truncate_record(folder):
    text = (folder / "build.json").read_text()
    (folder / "build.json").write_text(text[: len(text) // 2])


@pytest.mark.parametrize(
    "damage",
    [
        damage_library,
        truncate_record,
        lambda folder: (folder / "build.json").unlink(),
        lambda folder: (folder / "build.json").write_text("{}"),
        lambda folder: (folder / "build.json").write_text("[1]"),
        lambda folder: (folder / "artefact.so").unlink(),
        lambda folder: (folder / "log.txt").unlink(),
    ],
    ids=["library", "record", "no_record", "empty", "list", "no_library", "no_log"],
)
def test_damaged_or_half_written_folder_is_replaced(gcc, cache, damage):
    first = build(gcc, cache, cpp())
    damage(Path(first.artefact).parent)
    second = build(gcc, cache, cpp())
    assert second.status is Status.CORRECT
    assert not second.is_cached
    assert build(gcc, cache, cpp()).is_cached
    assert not leftovers(cache)


def test_builders_racing_for_one_key_agree(gcc, cache):
    with (
        Builder(gcc, cache, num_workers=1) as one,
        Builder(gcc, cache, num_workers=1) as two,
    ):
        first, second = one.submit(cpp()), two.submit(cpp())
        builds = [first.result(BUILT_S), second.result(60)]
    assert builds[0].artefact == builds[1].artefact
    assert builds[0].binary_key == builds[1].binary_key
    assert build(gcc, cache, cpp()).is_cached
    assert not leftovers(cache)


def test_whatever_shapes_the_code_changes_the_key(gcc, cache):
    gcc = dataclasses.replace(gcc, cpp_flags=CPP_FLAGS)  # native, so that the processor counts
    flags = dataclasses.replace(gcc, cpp_flags=(*gcc.cpp_flags, "-DX"))
    version = dataclasses.replace(gcc, versions=((gcc.host_compiler, "g++ 99"),))
    cpu = dataclasses.replace(gcc, cpu="another one")
    variables = dataclasses.replace(gcc, variables=(("CPATH", "/x"),))
    keys = []
    for toolchain in (gcc, flags, version, cpu, variables):
        with Builder(toolchain, cache, num_workers=1) as builder:
            keys += [builder.key(cpp(1)), builder.key(cpp(2))]
    assert len(set(keys)) == len(keys)


def test_cpu_shapes_the_key_only_where_march_native_is_used(gcc):
    gcc = dataclasses.replace(gcc, cpp_flags=CPP_FLAGS)
    other = dataclasses.replace(gcc, cpu="another one")
    assert gcc.signature("cpp") != other.signature("cpp")
    assert gcc.signature("cuda") == other.signature("cuda")
    portable = tuple(flag for flag in CPP_FLAGS if flag != "-march=native")
    one, two = (dataclasses.replace(t, cpp_flags=portable) for t in (gcc, other))
    assert one.signature("cpp") == two.signature("cpp")


def test_cache_folder_is_created_private(builder, cache):
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_cache_folder_that_others_may_write_to_is_refused(gcc, cache, mode):
    cache.mkdir()
    cache.chmod(mode)
    with pytest.raises(StorageError, match="others may write"):
        Builder(gcc, cache, num_workers=1)


def test_cache_folder_of_another_user_is_refused(gcc, cache):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    cache.mkdir(mode=0o700)
    os.chown(cache, 12345, 12345)
    with pytest.raises(StorageError, match="belongs to user 12345"):
        Builder(gcc, cache, num_workers=1)


def test_cache_folder_that_cannot_be_made_is_a_storage_error(gcc, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cache"):
        Builder(gcc, tmp_path / "file" / "cache", num_workers=1)


def test_default_cache_folder_follows_xdg(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "tuner" / "builds"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert default_cache_dir() == Path.home() / ".cache" / "tuner" / "builds"


def test_temporary_folders_of_killed_builders_are_swept_whatever_the_clock_says(
    tmp_path, cache, pid_file, gcc
):
    (cache / ".tmp-left").mkdir(parents=True)
    cache.chmod(0o700)
    slow = fake(tmp_path, HANG)
    with Builder(slow, cache, num_workers=1) as builder:  # it sweeps what nobody holds
        builder.submit(cpp())
        read_pids(pid_file)
        (mine,) = leftovers(cache)
        assert mine != ".tmp-left"
        os.utime(cache / mine, (0, 0))  # as if the clock had jumped by decades
        Builder(gcc, cache, num_workers=1).close()
        assert leftovers(cache) == [mine]
    assert leftovers(cache) == []


def test_a_cache_that_is_deleted_while_it_is_used_is_made_again(builder, cache):
    first = builder.submit(cpp()).result()
    shutil.rmtree(cache)
    second = builder.submit(cpp()).result()
    assert Path(second.artefact).is_file() and second.binary_key == first.binary_key
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700


@pytest.mark.parametrize("size", ["8k", "64k"])
def test_full_disk_is_a_storage_error_and_not_a_verdict(gcc, tmp_path, size):
    disk = tmp_path / "disk"
    disk.mkdir()
    options = f"size={size},mode=700"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small file system cannot be mounted here")
    try:
        text = CPP + "static const char big[] = {" + "1," * 30000 + "};\n"
        text += 'extern "C" const char* op_big() { return big; }\n'
        with pytest.raises(StorageError, match="No space left on device"):
            build(gcc, disk, cpp(text=text))
        assert not leftovers(disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# ---- time, pauses, ends ---------------------------------------------------------------------

HANG = 'echo $$ > "$PID_FILE"; sleep 1000 & echo $! >> "$PID_FILE"; wait\n'


@pytest.fixture
def pid_file(tmp_path, monkeypatch):
    path = tmp_path / "pids"
    monkeypatch.setenv("PID_FILE", str(path))
    return path


def read_pids(path):
    wait_until(lambda: path.exists() and path.read_text().count("\n") == 2)
    return [int(line) for line in path.read_text().split()]


def test_hanging_compiler_is_a_timeout_and_leaves_no_process(tmp_path, cache, pid_file):
    toolchain = fake(tmp_path, "echo started\n" + HANG)
    built = build(toolchain, cache, cpp(), timeout_s=0.5)
    assert built.status is Status.TIMEOUT
    assert built.error == "the compiler was killed after 0.5 s"
    assert Path(built.log).read_text() == "started\n"
    assert all(wait_until(lambda pid=pid: is_gone(pid)) for pid in read_pids(pid_file))
    assert not leftovers(cache)


def test_timeout_is_not_believed_by_another_builder(tmp_path, cache, pid_file, gcc):
    toolchain = fake(tmp_path, HANG)
    assert build(toolchain, cache, cpp(), timeout_s=0.2).status is Status.TIMEOUT
    fake(tmp_path, f'exec {gcc.host_compiler} "$@"\n')
    second = build(toolchain, cache, cpp())
    assert second.status is Status.CORRECT
    assert not second.is_cached


def test_pause_stops_running_compilers_and_does_not_count(tmp_path, cache, pid_file):
    toolchain = fake(tmp_path, HANG)
    with Builder(toolchain, cache, num_workers=1, timeout_s=1.0) as builder:
        submitted = time.monotonic()
        future = builder.submit(cpp())
        pids = read_pids(pid_file)
        with builder.paused():
            stopped = [psutil.STATUS_STOPPED] * 2
            assert wait_until(lambda: [psutil.Process(p).status() for p in pids] == stopped)
            time.sleep(1.5)
            assert not future.done()
            assert builder.pending == 1
        assert future.result(BUILT_S).status is Status.TIMEOUT
        assert future.result().seconds <= time.monotonic() - submitted - 1.5
    assert builder.pending == 0


def test_no_compiler_starts_in_a_pause(builder, cache):
    with builder.paused():
        with builder.paused():
            future = builder.submit(cpp())
        time.sleep(0.3)
        assert not future.done()
    assert future.result(BUILT_S).status is Status.CORRECT


def test_close_kills_what_runs_even_in_a_pause_and_drops_what_waits(tmp_path, cache, pid_file):
    builder = Builder(fake(tmp_path, HANG), cache, num_workers=1)
    running, waiting = builder.submit(cpp(1)), builder.submit(cpp(2))
    pids = read_pids(pid_file)
    with builder.paused():
        builder.close()
    for future in (running, waiting):
        with pytest.raises(CancelledError):
            future.result(BUILT_S)
    assert all(wait_until(lambda pid=pid: is_gone(pid)) for pid in pids)
    assert not leftovers(cache)


def test_runaway_output_is_bounded(tmp_path, cache):
    toolchain = fake(tmp_path, "yes 'source.cpp:1: error: again' | head -c 40000000; exit 1\n")
    built = build(toolchain, cache, cpp())
    assert built.error == "source.cpp:1: error: again"
    assert Path(built.log).stat().st_size < 17 * 2**20
    assert "was dropped" in Path(built.log).read_text()[-100:]


@pytest.mark.parametrize(
    "script",
    [
        "kill -9 $$\n",
        "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\"; exit 9\n",
        "echo 'g++: fatal error: Killed signal terminated program cc1plus'; exit 1\n",
        "echo 'cc1plus: out of memory allocating 65536 bytes'; exit 1\n",
        "echo 'virtual memory exhausted: Cannot allocate memory'; exit 1\n",
    ],
)
def test_killed_compiler_is_not_believed_a_second_time(tmp_path, cache, script):
    toolchain = fake(tmp_path, script)
    first = build(toolchain, cache, cpp())
    assert first.status is Status.COMPILE
    assert first.error
    assert not build(toolchain, cache, cpp()).is_cached


@pytest.mark.parametrize(
    "words",
    [
        "No space left on device",
        "Disk quota exceeded",
        "<built-in>: fatal error: when writing output to /x/tmpxft.cpp4.ii: Invalid argument",
    ],
)
def test_compiler_that_says_the_disk_is_full_is_believed(tmp_path, cache, words):
    toolchain = fake(tmp_path, f"echo 'ld: {words}'; exit 1\n")
    with pytest.raises(StorageError, match="No space left"):
        build(toolchain, cache, cpp())


def test_storage_error_is_not_the_last_word(tmp_path, cache, gcc):
    toolchain = fake(tmp_path, "echo 'No space left on device'; exit 1\n")
    with Builder(toolchain, cache, num_workers=1) as builder:
        with pytest.raises(StorageError):
            builder.submit(cpp()).result(BUILT_S)
        fake(tmp_path, f'exec {gcc.host_compiler} "$@"\n')
        assert builder.submit(cpp()).result(BUILT_S).status is Status.CORRECT


@pytest.mark.parametrize(
    ("script", "words"), [("exit 0\n", "wrote nothing"), ("echo x > artefact.so", "ELF")]
)
def test_compiler_that_writes_no_library_is_a_toolchain_error(tmp_path, cache, script, words):
    with pytest.raises(ToolchainError, match=words):
        build(fake(tmp_path, script), cache, cpp())


def test_compiler_that_cannot_be_run_is_a_toolchain_error(cache):
    with pytest.raises(ToolchainError, match="cannot run /nowhere/g"):
        build(Toolchain(kind="cpu", host_compiler="/nowhere/g++"), cache, cpp())


def test_many_builds_in_parallel_from_many_threads(builder):
    builds = {}

    def submit(number):
        builds[number] = builder.submit(cpp(number % 3)).result(BUILT_S)

    threads = [threading.Thread(target=submit, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(built.status is Status.CORRECT for built in builds.values())
    assert len({built.binary_key for built in builds.values()}) == 3


# ---- the toolchain --------------------------------------------------------------------------


def test_missing_compilers_are_named_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError, match=r"(?s)no C\+\+ compiler.*install g\+\+"):
        Toolchain.find("cpu")
    assert Toolchain.find("cpu", languages=["triton"]).host_compiler is None


def test_missing_nvcc_is_named_with_what_to_install(gcc, cache):
    with pytest.raises(ToolchainError, match=r"(?s)nvcc not found.*CUDA toolkit"):
        build(gcc, cache, cuda())


def test_compiler_that_does_not_work_is_named(monkeypatch, tmp_path):
    script = tmp_path / "broken"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(ToolchainError, match="broken --version does not work"):
        Toolchain.find("cpu")


def test_cpu_toolchain_names_compiler_flags_and_processor(gcc):
    assert dict(gcc.versions)[gcc.host_compiler]
    assert f"-march={vectors().march}" in gcc.cpp_flags
    assert "-ffast-math" not in gcc.cpp_flags
    assert gcc.cpu


@needs_nvcc
@pytest.mark.parametrize(
    ("capability", "flag"),
    [
        (80, "-gencode=arch=compute_80,code=sm_80"),
        (90, "-gencode=arch=compute_90a,code=sm_90a"),
        (120, "-gencode=arch=compute_120,code=sm_120"),
    ],
)
def test_code_is_made_for_exactly_the_gpu(capability, flag):
    assert flag in Toolchain.find("cuda", capability).device_flags


@needs_nvcc
def test_gpu_that_nvcc_does_not_know_is_refused():
    with pytest.raises(ToolchainError, match=r"cannot compile for compute capability 3.5"):
        Toolchain.find("cuda", 35)


# ---- CUDA -----------------------------------------------------------------------------------


@needs_nvcc
def test_kernel_resources_are_read(nvcc, cache):
    built = build(nvcc, cache, cuda())
    assert built.status is Status.CORRECT
    (kernel,) = built.kernels
    assert kernel.name == "(anonymous namespace)::op_add_kernel<1>"
    assert 0 < kernel.registers <= 255
    assert kernel.smem_bytes == 1024
    assert (kernel.spill_store_bytes, kernel.spill_load_bytes, kernel.stack_bytes) == (0, 0, 0)
    assert "ptxas info" in Path(built.log).read_text()
    assert ctypes.CDLL(built.artefact).op_add  # loads where there is no GPU
    assert build(nvcc, cache, cuda()).kernels == built.kernels


@needs_nvcc
@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("tile[255", "tilt[255", 'error: identifier "tilt" is undefined'),
        ("tile[256]", "tile[99999]", "ptxas error   : Entry function"),
        ("cudaGetErrorString(", "missing_function(", "error: identifier"),
    ],
)
def test_error_of_either_half_of_nvcc_is_found(nvcc, cache, old, new, error):
    built = build(nvcc, cache, cuda(text=CUDA.replace(old, new)))
    assert built.status is Status.COMPILE
    assert error in built.error


@needs_nvcc
def test_same_machine_code_has_the_same_binary_key(nvcc, tmp_path):
    first = build(nvcc, tmp_path / "a", cuda(1))
    elsewhere = build(nvcc, tmp_path / "b", cuda(1))
    reworded = build(nvcc, tmp_path / "a", cuda("4 - 3", CUDA.replace("NOTE", "another")))
    other = build(nvcc, tmp_path / "a", cuda(2))
    assert reworded.key != first.key == elsewhere.key
    assert first.binary_key == elsewhere.binary_key == reworded.binary_key
    assert other.binary_key != first.binary_key


@needs_nvcc
def test_launch_and_message_are_part_of_the_binary_key(nvcc, cache):
    texts = [
        CUDA,
        CUDA.replace("<<<1, 256", "<<<2, 256"),
        CUDA.replace("return cuda", 'if (n > 9) return "too many"; return cuda'),
        CUDA.replace("return cuda", 'if (n > 9) return "too large"; return cuda'),
    ]
    with Builder(nvcc, cache, num_workers=2) as builder:
        futures = [builder.submit(cuda(text=text)) for text in texts]
        keys = {future.result(BUILT_S).binary_key for future in futures}
    assert len(keys) == 4


def test_binary_key_of_cpp_ignores_comments_and_obeys_code_and_plan(builder):
    plan = dataclasses.replace(PLAN, outputs=(Tensor("y", ("2 * n",)),))
    first, reworded, other, planned = (
        builder.submit(candidate).result(BUILT_S).binary_key
        for candidate in (
            cpp(1),
            cpp("(2 - 1)", CPP + "// the end"),
            cpp(2),
            cpp(1, plan=plan),
        )
    )
    assert first == reworded
    assert len({first, other, planned}) == 3


def test_what_is_not_elf_is_refused():
    with pytest.raises(ToolchainError, match="ELF"):
        hash_code(b"\x7fELF\x01\x01 32-bit")


# ---- Triton ---------------------------------------------------------------------------------


def test_triton_module_is_its_own_artefact_and_is_not_run(builder, tmp_path):
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    built = builder.submit(cpp(text=text, language="triton")).result(BUILT_S)
    assert built.status is Status.CORRECT
    assert Path(built.artefact).name == "source.py"
    assert Path(built.artefact).read_text() == text
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("x = 1\ndef f(:\n", "source.py:2: error: SyntaxError: invalid syntax"),
        ("if 1:\nx = 2\n", "source.py:2: error: IndentationError: "),
        ("x = 1\n\0", "error: "),
    ],
)
def test_triton_syntax_error_names_its_line(builder, text, error):
    built = builder.submit(cpp(text=text, language="triton")).result(BUILT_S)
    assert built.status is Status.COMPILE
    assert error in built.error


has_triton = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not has_triton, reason="triton is not installed")
TRITON = """
import triton
import triton.language as tl

@triton.jit
def op_add_kernel(x, y, n, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < n
    tl.store(y + places, tl.load(x + places, mask=inside) + NUMBER, mask=inside)

def op_add(x, y, n):
    op_add_kernel[(triton.cdiv(n, 128),)](x, y, n, BLOCK=128)  # NOTE
"""
TRITON_PLAN = Plan(
    "op",
    (Argument("x", shape=("n",)),),
    (Tensor("y", ("n",)),),
    (),
    (Step("call", "op_add", ("x", "y", "n")),),
)
FOR_GPU = Toolchain("cuda", None, capability=90, triton="installed")


def triton(number="1.0", text=TRITON, plan=TRITON_PLAN):
    return Candidate("op", "t", {}, "triton", text.replace("NUMBER", str(number)), plan)


@pytest.mark.parametrize("place", ["usual", "a file", "shared"])
def test_kernels_are_in_tritons_folder_where_that_is_ours_alone(
    cache, tmp_path, monkeypatch, place
):
    folder = tmp_path / "taken" / "triton"
    monkeypatch.setenv(TRITON_CACHE, str(folder))
    if place == "a file":
        folder.parent.write_text("")
    if place == "shared":
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    with Builder(FOR_GPU, cache, num_workers=1, triton_sizes=[{"n": 1024}]) as builder:
        found = builder.environment[TRITON_CACHE]
    assert found == str(folder if place == "usual" else cache / "triton")


@needs_triton
def test_triton_is_compiled_ahead_and_a_second_builder_compiles_nothing(cache, monkeypatch):
    monkeypatch.setenv(TRITON_CACHE, str(cache / "triton"))
    sizes = [{"n": 1024}, {"n": 257}]
    built = build(FOR_GPU, cache, triton(), triton_sizes=sizes)
    assert (built.status, built.error) == (Status.CORRECT, "")
    assert Path(built.artefact).name == "source.py"
    assert {kernel.name for kernel in built.kernels} == {"op_add_kernel"}
    assert len(built.kernels) == 2 and all(kernel.registers > 0 for kernel in built.kernels)
    binaries = set((cache / "triton").rglob("*.cubin"))
    assert len(binaries) == 2  # one for multiples of 16, one for other sizes
    again = build(FOR_GPU, cache, triton(), triton_sizes=sizes)
    assert again.is_cached and again.kernels == built.kernels
    assert set((cache / "triton").rglob("*.cubin")) == binaries
    shutil.rmtree(cache / "triton")  # as one empties a cache
    anew = build(FOR_GPU, cache, triton(), triton_sizes=sizes)
    assert anew.status is Status.CORRECT
    assert set((cache / "triton").rglob("*.cubin")) == binaries
    assert leftovers(cache) == []


@needs_triton
def test_triton_kernels_of_further_calls_are_compiled_ahead_too(cache):
    text = TRITON + TRITON.replace("op_add", "op_more").replace("NUMBER", "3.0")
    more = dataclasses.replace(
        TRITON_PLAN, function="op_eval", steps=(Step("call", "op_more", ("x", "y", "n")),)
    )
    plan = dataclasses.replace(TRITON_PLAN, extra={"eval": more, "other": None})
    sizes = [{"n": 1024}]
    built = build(FOR_GPU, cache, triton(text=text, plan=plan), triton_sizes=sizes)
    assert built.status is Status.CORRECT
    assert {kernel.name for kernel in built.kernels} == {"op_add_kernel", "op_more_kernel"}
    alone = build(FOR_GPU, cache, triton(text=text), triton_sizes=sizes)
    assert alone.binary_key != built.binary_key


@needs_triton
def test_triton_candidates_with_the_same_code_and_launches_have_one_key(cache):
    texts = {
        "first": TRITON,
        "reworded": TRITON.replace("# NOTE", "# other words"),
        "other": TRITON.replace("NUMBER", "2.0"),
        "grid": TRITON.replace("cdiv(n, 128),)", "cdiv(n, 128) + 1,)"),
        "in place": TRITON.replace("](x, y,", "](y, y,"),
    }
    with Builder(FOR_GPU, cache, num_workers=2, triton_sizes=[{"n": 1024}]) as builder:
        builds = {n: builder.submit(triton(text=t)) for n, t in texts.items()}
        keys = {name: future.result(BUILT_S).binary_key for name, future in builds.items()}
    assert keys["first"] == keys["reworded"] != ""
    assert len(set(keys.values())) == 4


@needs_triton
def test_triton_kernel_that_does_not_compile_says_why(cache):
    text = TRITON.replace("tl.load(x", "tl.no_such_word(x")
    built = build(FOR_GPU, cache, triton(text=text), triton_sizes=[{"n": 1024}])
    assert built.status is Status.COMPILE and built.artefact is None
    assert "no_such_word" in built.error and len(built.error) <= 400
    assert "Traceback" in Path(built.log).read_text()


@needs_triton
def test_triton_host_code_that_refuses_is_left_to_the_worker(cache):
    text = TRITON.replace(
        "    op_add_kernel[(", '    raise RuntimeError("no")\n    op_add_kernel[('
    )
    built = build(FOR_GPU, cache, triton(text=text), triton_sizes=[{"n": 1024}])
    assert built.status is Status.CORRECT and built.binary_key != ""
    assert built.note == "left to the worker: RuntimeError: no"


def test_triton_that_is_missing_is_a_toolchain_error(cache):
    toolchain = Toolchain("cuda", None, capability=90, triton=None)
    with pytest.raises(ToolchainError, match=r"(?s)Triton is not installed.*pip install triton"):
        build(toolchain, cache, triton(), triton_sizes=[{"n": 1024}])


# ---- reading logs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (
            'warning: x\nsource.cu(12): error: identifier "foo" is undefined\nmore error: x',
            'source.cu(12): error: identifier "foo" is undefined',
        ),
        ("source.cpp:1:2: fatal error: no.h: No such file", "source.cpp:1:2: fatal error: no.h"),
        ("source.cu(3): error #20: old style", "source.cu(3): error #20: old style"),
        ("ptxas error   : Entry function 'k' uses too", "ptxas error   : Entry function"),
        ("ptxas fatal   : Value 'sm_1' is not", "ptxas fatal   : Value"),
        ("nvcc fatal   : Unsupported gpu", "nvcc fatal   : Unsupported"),
        (
            "x.cpp:(.text+0x9): undefined reference to `f'\ncollect2: error: ld returned 1",
            "x.cpp:(.text+0x9): undefined reference to `f'",
        ),
        ("strange words\n", "the compiler exited with status 1: strange words"),
        ("", "the compiler exited with status 1"),
        ("source.cpp:1: error: " + "x" * 5000, "source.cpp:1: error: xxx"),
    ],
)
def test_first_error_line(log, error):
    found = first_error(log, 1)
    assert found.startswith(error)
    assert len(found) <= 400


def test_error_of_a_killed_compiler_names_the_signal():
    assert first_error("", -signal.SIGSEGV) == "the compiler was killed by signal 11"


def test_resources_of_several_kernels_with_spills_and_device_functions():
    log = """
ptxas info    : 16 bytes gmem
ptxas info    : Compiling entry function '_Z3onePf' for 'sm_90a'
ptxas info    : Function properties for _Z3onePf
    800 bytes stack frame, 12 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 800 bytes cumulative stack size, 49152 bytes \
smem
ptxas info    : Compile time = 49.539 ms
ptxas info    : Function properties for _Z6helperf
    4 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Compiling entry function '_Z3twov' for 'sm_90a'
ptxas info    : Function properties for _Z3twov
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, 1024+16 bytes smem, 376 bytes cmem[0]
"""
    expected = (
        KernelResources("_Z3onePf", 255, 49152, 12, 24, 800),
        KernelResources("_Z3twov", 8, 1024, 0, 0, 0),
    )
    assert parse_resources(log, None) == expected
    assert parse_resources(log, "/nowhere/c++filt") == expected


def test_record_on_disk_is_readable_json(builder):
    built = builder.submit(cpp()).result(BUILT_S)
    record = json.loads((Path(built.artefact).parent / "build.json").read_text())
    assert record["build"]["artefact"] == "artefact.so"
    assert len(record["artefact_sha256"]) == 64


def test_importing_the_room_needs_no_torch():
    code = (
        "import sys, tuner.kernel.builder, tuner.evaluate.worker; sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parent.parent
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0
