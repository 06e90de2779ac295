"""Shared by all tests: where there is a GPU, and caches that are nobody's but this session's."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

# Where pytest puts tmp_path, which stays after a failure. Workers of pytest-xdist inherit it.
_ROOT = os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())

# Set before any test module imports PyTorch or the tuner, and inherited by every child process.
# A worker of pytest-xdist imports this file, too, so it gets folders of its own: compilers of
# several workers collided in one TMPDIR, since nvcc names its intermediate files by process id.
_CACHES = Path(tempfile.mkdtemp(prefix="tuner-tests-", dir=_ROOT))
for _variable, _folder in {
    "TMPDIR": "tmp",
    "XDG_CACHE_HOME": "cache",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
}.items():
    os.environ[_variable] = str(_CACHES / _folder)
# What the tests of templates compile, for all workers: theirs is the folder of who started them.
os.environ.setdefault("TUNER_TESTS_BUILDS", str(_CACHES / "builds"))
# Exported files too, of which several tests have the same: each takes 5 s of CPU.
_extensions = os.environ.setdefault("TUNER_TESTS_EXTENSIONS", str(_CACHES / "torch_extensions"))
os.environ["TORCH_EXTENSIONS_DIR"] = _extensions
# The ninja beside Python, which the tuner's own processes find: another one, of a version with
# another log, compiled again what they had compiled.
_beside_python = str(Path(sys.executable).parent)
if _beside_python not in os.environ["PATH"].split(os.pathsep):
    os.environ["PATH"] = f"{_beside_python}{os.pathsep}{os.environ['PATH']}"
# Their compiler finds PyTorch's headers precompiled: `c++` on the PATH, once for all workers.
_own_compiler = shutil.which("c++")
if _own_compiler is not None and "CXX" not in os.environ and "TUNER_TESTS_CXX" not in os.environ:
    _bin = _CACHES / "bin"
    _bin.mkdir()
    (_bin / "c++").symlink_to(Path(__file__).with_name("extension_compiler.sh").absolute())
    os.environ["TUNER_TESTS_CXX"] = _own_compiler
    os.environ["TUNER_TESTS_HEADERS"] = str(_CACHES / "headers")
    os.environ["PATH"] = f"{_bin}{os.pathsep}{os.environ['PATH']}"
# Workers of the tuner that are timed do not rest, and flush less. Those that capture find what
# PyTorch imports and looks up for its first record, those that check an exported file what
# compiles it, and each that times one what a confidence interval needs: 0.1 s and more.
os.environ["TUNER_PRELOAD"] = "tests.impatient_workers tests.recorded_once scipy.special"
# Workers of pytest-xdist share the cores: threads that spin where they wait take them from the
# others, for whole time slices at each of OpenMP's barriers. And as it asks the system for memory
# anew, a process has page faults. It is what a check's processes have (`contender.QUIET`): all
# others as well, so that a tuner starts one fork server, which takes 3 s of CPU, and not two.
for _variable, _value in {
    "OMP_WAIT_POLICY": "passive",
    "GOMP_SPINCOUNT": "0",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
}.items():
    os.environ.setdefault(_variable, _value)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of NumPy and SciPy: as a search has it
# Two threads of each of two workers on two cores waited for one another at each small operation:
# the tests of the check took 140 s of CPU instead of 90 s, and twice as long.
_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
if _workers:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))
# GPUs as `0,1`, of which each worker takes one: `TUNER_TESTS_GPUS=0,1 pytest -m gpu -n 30`.
_gpus = os.environ.get("TUNER_TESTS_GPUS", "").split(",")
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
if _gpus != [""] and _worker:
    os.environ["CUDA_VISIBLE_DEVICES"] = _gpus[int(_worker.removeprefix("gw")) % len(_gpus)]
# Where bytecode is not to be kept, each of some hundred processes would compile the tuner's own
# text again, for 0.5 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# These caches begin empty, and the few kernels that tests compile do not pay for the headers', nor
# for the six programs that tell whether vector instructions work.
os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
# A capture makes ten thousands of objects that live until its end: by default Python looks through
# the young ones 1,300 times in test_capture, for a twentieth of its CPU.
gc.set_threshold(20_000, 20, 20)
tempfile.tempdir = os.environ["TMPDIR"]  # else it keeps what it found before
Path(tempfile.tempdir).mkdir()
Path(os.environ["XDG_CACHE_HOME"]).mkdir()  # PyTorch's own kernel cache makes no parents


def pytest_configure() -> None:
    from impatience import few_probes, few_rows, no_rest

    no_rest()
    few_probes()
    few_rows()


@pytest.fixture(scope="module")
def few(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ask few probes in a check, for tests of what is around it, and profile in one file alone."""
    asked = ["FEW_PROBES", *(["UNPROFILED"] if request.module.__name__ != "test_tuning" else [])]
    os.environ |= dict.fromkeys(asked, "1")
    yield
    for name in asked:
        del os.environ[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write what was rendered into tests/golden/ instead of comparing",
    )
    parser.addoption(
        "--brief",
        action="store_true",
        help="of tests with many cases, and of those in tests/brief.txt, run some",
    )


def pytest_unconfigure() -> None:
    shutil.rmtree(_CACHES, ignore_errors=True)


# The longest, in this order: started first, or one of two workers would be left alone in the end.
_LONG = (
    "test_sizes",
    "test_verification",
    "test_steps",
    "test_check",
    "test_tuning",
    "test_any_module",
    "test_report_browser",
    "test_cheats",
    "test_evaluate",
    "test_fleet",
    "test_cli",
    "test_earlier",
    "test_build",
    "test_live_module",
    "test_batched_products",
    "test_counters",
    "test_data_timed",
    "test_by_batch",
    "test_results_of_steps",
    "test_clusters",
    "test_worker",
    "test_matching",
    "test_faults",
    "test_campaign",
    "test_cuda_beside",
    "test_search",
    "test_pytorchs_steps",
    "test_rules_of_steps",
    "test_in_use",
    "test_template_wgmma",
    "test_resume",
    "test_converted_products",
    "test_binding",
    "test_kept",
    "test_eval_mode",
    "test_kinks",
    "test_partitions",
    "test_templates_cpu",
    "test_product_moments",
    "test_export",
    "test_terminal",
    "test_surrogate",
    "test_recording",
    "test_by_hand",
    "test_turns",
    "test_drop_in",
    "test_rewrites",
    "test_operations",
    "test_gain",
    "test_run",
    "test_architecture",
    "test_trust_classes",
    "test_isolation",
)


_MOST_CASES = 2  # of a test that brief.txt does not name


def _brief() -> dict[str, int]:
    """Return how many cases of a test are enough, by `file::test`, from brief.txt."""
    lines = Path(__file__).with_name("brief.txt").read_text(encoding="utf-8").splitlines()
    left = (line.split() for line in lines if line and not line.startswith("#"))
    return {name: int(count) for name, count, *_ in left}


def _left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return the cases that are not run where few are enough; a GPU's all are."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("gpu"):
            name = f"{item.path.name}::{getattr(item, 'originalname', item.name)}"
            cases.setdefault(name, []).append(item)
    left_out: set[pytest.Item] = set()
    counts = _brief()
    for name, found in cases.items():
        count = counts.get(name, _MOST_CASES)
        kept = {place * len(found) // count for place in range(count)} if count else set()
        left_out |= {item for place, item in enumerate(found) if place not in kept}
    return left_out


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import each worker's share of all files first: what one has compiled, the others find.

    Of a fresh checkout each of them would rewrite the asserts of all files, for 3 s of CPU.
    """
    if not _workers or [*map(Path, session.config.args)] != [Path("tests")]:
        return
    names = sorted(path.stem for path in Path(__file__).parent.glob("test_*.py"))
    first = int(_worker.removeprefix("gw")) * len(names) // _workers
    for name in [*names[first:], *names[:first]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # which collecting it says
            importlib.import_module(name)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--brief"):
        left_out = _left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    places = {name: place for place, name in enumerate(_LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(_LONG)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda sees none"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Let a test that fills a GPU wait for all others on it, and those for it."""
    if not item.get_closest_marker("gpu") or not _has_gpu():
        return (yield)
    takes_all = "whole_gpu" in getattr(item, "fixturenames", ())
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    gate, device = (Path(_ROOT) / f"tuner-tests-{name}-{gpu}" for name in ("gate", "gpu"))
    with gate.open("w") as to_wait, device.open("w") as to_run:
        how = fcntl.LOCK_EX if takes_all else fcntl.LOCK_SH
        fcntl.flock(to_wait, how)  # who waits to have it alone is not overtaken
        fcntl.flock(to_run, how)
        if not takes_all:
            fcntl.flock(to_wait, fcntl.LOCK_UN)
        return (yield)


@pytest.fixture(autouse=True)
def what_was_imported_is_no_garbage() -> Iterator[None]:
    """Else Python looks at PyTorch's 10^6 objects again and again: a third of a capture's CPU.

    Not where a GPU is used: what is kept for ever might hold its memory.
    """
    torch = sys.modules.get("torch")
    has_context = torch is not None and torch.cuda.is_initialized()
    if len(sys.modules) > _frozen_modules[0] + _MANY_MODULES and not has_context:
        gc.collect()
        gc.freeze()
        _frozen_modules[0] = len(sys.modules)
    yield


_MANY_MODULES = 50  # whose import, as of torch.export in a file's first test, is worth a look
_frozen_modules = [0]
_KEPT_BYTES = 2**30  # of a GPU's memory that a worker may keep unused from test to test


@pytest.fixture(autouse=True)
def unused_memory_goes_back_to_the_gpu() -> Iterator[None]:
    """PyTorch would keep what a test has freed: tens of GB that other workers then lack."""
    yield
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > _KEPT_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def most_of_the_gpu() -> Iterator[None]:
    """For a test that takes most of a GPU's memory: one at a time, over all workers."""
    with (Path(_ROOT) / "tuner-tests-most-of-the-gpu").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
        if "torch" in sys.modules:  # what PyTorch keeps of it is what the next one lacks
            gc.collect()
            sys.modules["torch"].cuda.empty_cache()


@pytest.fixture
def whole_gpu(most_of_the_gpu: None) -> None:
    """For a test that leaves others no memory: no other test runs on that GPU meanwhile.

    What processes of those before it held comes back a while after these were ended.
    """
    import torch

    until_s, free = time.monotonic() + 30.0, list[int]()
    while torch.cuda.is_available() and (len(free) < 5 or len({*free[-5:]}) > 1):
        assert time.monotonic() < until_s, f"a GPU's free memory keeps changing: {free[-5:]}"
        free.append(torch.cuda.mem_get_info()[0])
        time.sleep(0.25)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root."""
    return Path(__file__).parent.parent


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Iterator[object]:
    """A function that compares a text with tests/golden/<name>, or writes it there."""
    folder = Path(__file__).parent / "golden"

    def compare(name: str, text: str) -> None:
        path = folder / name
        if request.config.getoption("--update-golden"):
            folder.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.is_file(), f"{path} is missing: run pytest with --update-golden, then read it"
        assert text == path.read_text(encoding="utf-8")

    yield compare
