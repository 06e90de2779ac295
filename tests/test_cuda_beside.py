"""CUDA C++ in a Triton text: compiled once for each content, without spills; its errors' words."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_half_products import MODULES, TEXT, made_of

from tuner.capture.tasks.half_products import WGMMA_TEMPLATE
from tuner.config.run_config import load_config
from tuner.export.module import export_text
from tuner.export.several import apart
from tuner.kernel.binding import CUDA_CODE, bind
from tuner.kernel.builder import Builder
from tuner.kernel.compiler_words import parse_resources
from tuner.kernel.family import builtin_folder, load_family
from tuner.kernel.rendering import rendered
from tuner.kernel.toolchain import Toolchain
from tuner.kernel.triton_build import REPORT_FILE, AheadBuild
from tuner.kernel.triton_files import TRITON_CACHE, at_fixed_lines
from tuner.machine.datasheets import known_device
from tuner.planning.planning import plan
from tuner.session.tuning import derive_operator
from tuner.trial import Candidate, Status, from_json, to_json

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on the PATH")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
ANSWER = 'extern "C" const char* answer(void*) { return "forty-two"; }\n'
FLAGS = ["-std=c++17"]
# Consumers, groups, part, blocks: those with the fewest registers to spare; and halves.
IMAGE_TILES = [
    (*tile, halves)
    for tile in [(2, 1, 64, 2), (2, 2, 64, 1), (2, 2, 128, 1), (4, 1, 32, 2), (4, 2, 16, 2)]
    for halves in (1, 2)
]
NAMES = ("product_weight", "product_n", "product_k", "product_cluster")
# A text that converts holds kernels of both ways; 256 x 64 in clusters of 2 would spill.
TILES = [
    ("split", 192, 32, 2),
    *itertools.product(["converted"], [128, 192, 256], [32, 64], [1, 2]),
]
TILES.remove(("converted", 256, 64, 2))


def here_and_on_a_gpu(tiles: list, some: list) -> list:
    """Some of the tiles as they are, the others where there is a GPU: each takes nvcc 7 s."""
    assert all(tile in tiles for tile in some)
    return [
        pytest.param(tile, id=str(tile), marks=[] if tile in some else pytest.mark.gpu)
        for tile in tiles
    ]


def cuda_code(monkeypatch, folder: Path):
    """What makes an object of the text's class, and compiles into `folder`."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    names: dict = {}
    exec((builtin_folder() / "_lib" / "triton_cuda.py").read_text(), names)
    return lambda text, flags: names["CudaCode"](text, flags).load()


@needs_nvcc
def test_equal_texts_are_compiled_once_also_at_the_same_time(monkeypatch, tmp_path):
    make = cuda_code(monkeypatch, tmp_path / "cache")
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(lambda _: make(ANSWER, FLAGS), range(3)))
    (path,) = {code.path for code in made}
    before = Path(path).stat().st_mtime_ns
    again = make(ANSWER, FLAGS)
    assert (again.path, Path(path).stat().st_mtime_ns) == (path, before)
    other = make(ANSWER.replace("forty", "fifty"), FLAGS)
    assert other.key != again.key and other.path != path
    assert len(list((tmp_path / "cache").glob("*.so"))) == 2
    assert not [place for place in (tmp_path / "cache").iterdir() if place.is_dir()]


@needs_nvcc
def test_a_text_is_compiled_when_that_is_asked_for_or_for_its_first_call(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    names: dict = {}
    exec((builtin_folder() / "_lib" / "triton_cuda.py").read_text(), names)
    code = names["CudaCode"](ANSWER, FLAGS)
    assert not (tmp_path / "cache").exists()
    code.load()
    (made,) = (tmp_path / "cache").glob("*.so")
    assert code.path == str(made) and names["CudaCode"](ANSWER, FLAGS).load().path == code.path


@needs_nvcc
@needs_triton
def test_calls_that_are_compiled_side_by_side_are_reported_as_one_after_the_other(
    tmp_path, monkeypatch
):
    """In processes of their own, since compiling ahead changes one for good."""
    init, forward, shape = MODULES["chain"]
    (tmp_path / "chain.py").write_text(TEXT.format(init=init, forward=forward, shape=shape))
    config = load_config(derive_operator(tmp_path / "chain.py").config, {"device": "cuda"})
    planned = plan(config, may_assume=True)
    (params,) = (p for p in planned.defaults if p["template"] == WGMMA_TEMPLATE)
    candidate = planned.family.render(params, planned.facts)
    (tmp_path / "source.py").write_text(candidate.source)
    (tmp_path / "plan.json").write_text(to_json(candidate.plan))
    found = []
    for is_apart in (True, False):
        folder = tmp_path / str(is_apart)
        folder.mkdir()
        further = planned.family.op.extra_sizes
        sizes = json.dumps([{**further, **its} for its in planned.screening_sizes])
        arguments = ["source.py", "plan.json", str(folder), "--arch", "90", "--sizes", sizes]
        env = {**os.environ, TRITON_CACHE: str(folder / "triton")}
        arguments += ["--apart"] if is_apart else []
        text = "import os; from tuner.kernel.triton_build import compile_in; "
        command = [sys.executable, "-c", f"{text}compile_in({arguments!r}, os.getppid())"]
        subprocess.run(
            command, cwd=tmp_path, env=env, check=True, capture_output=True, timeout=100
        )
        found.append(from_json(AheadBuild, (folder / REPORT_FILE).read_text()))
    apart, in_turn = found
    assert len(candidate.plan.calls) > 1 and not apart.error and not apart.note
    assert apart.binary_key == in_turn.binary_key != ""
    assert {*apart.kernels} == {*in_turn.kernels} and {*apart.folders} == {*in_turn.folders}
    assert any("product_of_halves_kernel" in kernel.name for kernel in apart.kernels)


@needs_nvcc
def test_a_text_that_does_not_compile_says_why_in_its_last_line(monkeypatch, tmp_path):
    make = cuda_code(monkeypatch, tmp_path)
    with pytest.raises(RuntimeError) as caught:
        make(ANSWER.replace("return", "retrun"), FLAGS)
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("beside.cu(1): error:") and "retrun" in last
    assert not list(tmp_path.glob("*.so"))


def test_without_nvcc_that_is_said(monkeypatch, tmp_path):
    make = cuda_code(monkeypatch, tmp_path)
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="nvcc not found: set CUDA_HOME"):
        make(ANSWER, FLAGS)


@needs_nvcc
@pytest.mark.parametrize(
    "tile", here_and_on_a_gpu(TILES, [("converted", 256, 32, 2), ("converted", 256, 64, 1)])
)
def test_no_tile_of_a_product_spills(tile, monkeypatch, tmp_path):
    make = cuda_code(monkeypatch, tmp_path)
    known = {**dict(zip(NAMES, tile, strict=True)), "product_raster": 8, "epilogues": ""}
    known["product_weights"] = ["rows", "columns"]
    text = '{% include "_lib/triton_wgmma.py" %}'
    text = rendered(Path("t.py"), text, [builtin_folder()], known)
    found: dict = {"CudaCode": make}
    start = text.index("cuda_code = CudaCode(")
    exec(text[start : text.index("def product_converts")], found)
    log = found["cuda_code"].log
    kernels = parse_resources(log, None)
    # Halves of x, what is computed again and pieces added up are kernels of the same text.
    assert len(kernels) == (6 if tile[0] == "converted" else 2)
    assert {k.spill_store_bytes for k in kernels} == {0}
    # What is computed again hands its sums from function to function by way of the stack.
    assert {k.stack_bytes for k in kernels if "repair" not in k.name} == {0}
    products = [k.registers for k in kernels if "product" in k.name]
    assert products == [168] * (3 if tile[0] == "converted" else 1)
    assert "wgmma.mma_async instructions are serialized" not in log


@needs_nvcc
@pytest.mark.parametrize(
    "tile",
    here_and_on_a_gpu([t for t in TILES if t[0] == "converted"], [("converted", 256, 64, 1)]),
)
def test_moments_of_columns_leave_the_loop_its_registers(tile, monkeypatch, tmp_path):
    """One register that was stored in each stage of it took more time than moments save."""
    make = cuda_code(monkeypatch, tmp_path)
    init = "self.a = nn.Linear(264, 260); self.n = nn.BatchNorm1d(260)"
    module = (init, "self.n(torch.relu(self.a(x)))", "704, 264")
    _, candidate = candidate_of(tmp_path, module, **dict(zip(NAMES, tile, strict=True)))
    text, found = candidate.source, {"CudaCode": make}
    exec(text[text.index("cuda_code = CudaCode(") : text.index("def product_converts")], found)
    kernels = parse_resources(found["cuda_code"].log, None)
    kernels = [k for k in kernels if "converted" in k.name and "product_kernel" in k.name]
    assert len(kernels) == 2 and any("_epilogue" in kernel.name for kernel in kernels)
    assert {k.spill_store_bytes for k in kernels} == {0}
    # What is computed again hands its sums from function to function by way of the stack.
    assert {k.stack_bytes for k in kernels if "repair" not in k.name} == {0}


@needs_nvcc
@pytest.mark.parametrize(
    "tile", here_and_on_a_gpu(IMAGE_TILES, [(2, 1, 64, 2, 2), (4, 2, 16, 2, 1)])
)
def test_no_tile_of_a_convolution_spills(tile, monkeypatch, tmp_path):
    make = cuda_code(monkeypatch, tmp_path)
    names = ("image_consumers", "image_groups", "image_part", "image_blocks", "image_halves")
    known = {**dict(zip(names, tile, strict=True)), "epilogues": ""}
    text = '{% include "_lib/triton_convolutions_wgmma.py" %}'
    text = rendered(Path("t.py"), text, [builtin_folder()], known)
    found: dict = {"CudaCode": make}
    start = text.index("cuda_code = CudaCode(")
    exec(text[start : text.index("def image_phase(", start)], found)
    log = found["cuda_code"].log
    kernels = parse_resources(log, None)
    assert len(kernels) in (2, 3)  # with two phases together, where those fit, or without
    assert {k.spill_store_bytes for k in kernels} == {0}
    # What is computed again hands its sums from function to function by way of the stack.
    assert {k.stack_bytes for k in kernels if "repair" not in k.name} == {0}
    assert "wgmma.mma_async instructions are serialized" not in log


def candidate_of(folder: Path, module=MODULES["epilogue"], **params) -> tuple:
    _, made = made_of(folder, module)
    family = load_family(made.name, [made.folder])
    facts = known_device("H200").facts()
    return family, family.render({"template": WGMMA_TEMPLATE, **params}, facts)


def test_an_exported_file_holds_the_cuda_text_and_names_its_compiler(tmp_path):
    family, candidate = candidate_of(tmp_path)
    text = export_text(
        family,
        candidate,
        reference=family.reference.read_text(),
        sizes={},
        flags=[],
        provenance=[],
    )
    assert candidate.source.strip() in text and "product_of_halves_kernel(const" in text
    assert "nvcc and a C++ compiler (at the first import)" in text
    compile(text, "model_new.py", "exec")


@needs_nvcc
@needs_triton
def test_cuda_text_is_compiled_ahead_and_part_of_the_binary_key(tmp_path, monkeypatch):
    monkeypatch.setenv(TRITON_CACHE, str(tmp_path / "triton"))
    toolchain = Toolchain("cuda", None, capability=90, triton="installed")
    family, one = candidate_of(tmp_path)
    _, other = candidate_of(tmp_path, product_k=32)
    broken = Candidate(
        one.op, one.template, {}, "triton", one.source.replace("make_float2", "flaot2"), one.plan
    )
    sizes = [dict(family.op.sizes)]
    # So many that the calls of a candidate and its CUDA C++ are compiled side by side.
    with Builder(toolchain, tmp_path / "cache", num_workers=8, triton_sizes=sizes) as builder:
        builds = [builder.submit(candidate).result(240) for candidate in (one, other)]
        bad = builder.submit(broken).result(240)
    assert [build.status for build in builds] == [Status.CORRECT] * 2, builds
    assert all("product_of_halves_kernel" in str(build.kernels) for build in builds)
    assert builds[0].binary_key != builds[1].binary_key
    assert len(list((tmp_path / "triton").glob("cuda-*.so"))) == 2
    assert bad.status is Status.COMPILE and "flaot2" in bad.error


KEYS = """
import json, sys
from pathlib import Path
from tuner.evaluate.modules import imported

found = {}
for name, value in vars(imported(Path(sys.argv[1]))).items():
    if type(value).__name__.startswith("CudaCode"):
        value.load()  # as its first call does
    kernel = vars(value)["kernel"] if type(value).__name__.startswith("launched") else value
    if type(kernel).__name__ == "JITFunction":
        found[name] = kernel.cache_key
print(json.dumps(found))
"""


def keys_of(path: Path, text: str) -> dict[str, str]:
    """Return by which keys Triton's cache knows the kernels of a text, in a process of its own."""
    path.write_text(text)
    command = [sys.executable, "-c", KEYS, str(path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(said.stdout)
    return found


@needs_nvcc
@needs_triton
def test_an_exported_file_compiles_nothing_that_a_search_has_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv(TRITON_CACHE, str(tmp_path / "triton"))
    toolchain = Toolchain("cuda", None, capability=90, triton="installed")
    family, candidate = candidate_of(tmp_path)
    sizes = [dict(family.op.sizes)]
    with Builder(toolchain, tmp_path / "cache", num_workers=1, triton_sizes=sizes) as builder:
        built = builder.submit(candidate).result(240)
    made = {*(tmp_path / "triton").glob("cuda-*.so")}
    keys, apart_keys = [], []
    for number in (1, 30):  # lines that stand above the kernels
        text = export_text(
            family, candidate, reference=family.reference.read_text(), sizes={}, flags=[],
            provenance=["a line"] * number,
        )  # fmt: skip
        keys.append(keys_of(tmp_path / f"exported_{number}.py", text))
        # As a kernel of several in one file, whose names have an ending.
        fixed = f"{inspect.getsource(at_fixed_lines)}\n\nat_fixed_lines(globals())\n"
        text = "# a line\n" * number + apart(f"{candidate.source}\n\n{fixed}", "_of_kernel_2")
        apart_keys.append(keys_of(tmp_path / f"apart_{number}.py", text))
    assert apart_keys[0] == apart_keys[1] and len(apart_keys[0]) == len(keys[0])
    assert built.status is Status.CORRECT and len(made) == 1
    assert keys[0] == keys[1] and len(keys[0]) > 3
    searched = bind(candidate.plan, "triton", Path(built.artefact)).globals
    own = {n: vars(v).get("kernel") or v for n, v in searched.items() if n in keys[0]}
    assert {n: kernel.cache_key for n, kernel in own.items()} == keys[0]
    searched[CUDA_CODE].load()
    assert {*(tmp_path / "triton").glob("cuda-*.so")} == made
