"""The exported file stands alone and is a drop-in replacement of its reference, on the CPU."""

from __future__ import annotations

import ast
import copy
import importlib.util
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tuner.build import Toolchain
from tuner.errors import TemplateError
from tuner.export import export_text, fallback_text
from tuner.problem import load_problem
from tuner.template import family_names, load_family

OP = "gemm_scale_batchnorm"
SIZES = {"batch": 6, "in_features": 5, "out_features": 7}
HOSTILE = (
    "two\nlines",
    "carriage\rreturn",
    "quotes \" ' \"\"\" '''",
    "NUL \x00 and bell \x07",
    "ends in a backslash \\",
    "separators \u2028 \u2029 \x85 \x0b \x0c",
    "right-to-left \u202e and a lone surrogate \ud800",
    "naïve 中文 ⚡",
    "import os; os.abort()",
    "tune pass --try: 1 /data/pass/x except",
)
FACTS = {
    "device.kind": "cuda",
    "device.capability": 90,
    "device.num_sms": 132,
    "device.smem_bytes_max": 232448,
}


def text_of(**changes) -> str:
    family = load_family(OP)
    options = {
        "reference": family.reference.read_text(),
        "sizes": SIZES,
        "flags": Toolchain.find("cpu").cpp_flags,
        "provenance": [],
        **changes,
    }
    return export_text(family, family.render({"template": "cpu"}), **options)


@pytest.fixture(scope="session")
def path(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "model_new.py"
    path.write_text(text_of(provenance=HOSTILE), encoding="utf-8")
    return path


def imported(path: Path, name: str):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def new(path):
    """The exported module, compiled once for all tests."""
    return imported(path, "exported_once")


@pytest.fixture(scope="session")
def problem():
    return load_problem(load_family(OP).reference, SIZES)


@pytest.fixture
def pair(new, problem) -> SimpleNamespace:
    """A reference and a replacement with equal weights, and an input."""
    torch.manual_seed(1)
    theirs = problem.module.Model(*problem.module.get_init_inputs())
    torch.manual_seed(1)
    ours = new.ModelNew(*new.get_init_inputs())
    return SimpleNamespace(theirs=theirs, ours=ours, x=torch.randn(6, 5))


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


def assert_same_state(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    mine, others = ours.state_dict(), theirs.state_dict()
    assert list(mine) == list(others)
    for name in mine:
        assert mine[name].dtype == others[name].dtype
        assert_close(mine[name], others[name])


# ---- the file -------------------------------------------------------------------------------


def test_it_runs_in_a_process_that_has_no_tuner(path, new, tmp_path):
    code = textwrap.dedent("""
        import importlib.util, sys
        sys.modules["tuner"] = None  # importing it raises
        spec = importlib.util.spec_from_file_location("alone", sys.argv[1])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        model = module.ModelNew(*module.get_init_inputs())
        y = model(*module.get_inputs())
        y.sum().backward()
        print(list(y.shape), model.gemm.weight.grad is not None)
        assert not [name for name in sys.modules if name.startswith("tuner.")]
    """)
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, str(path)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[6, 7] True\n"


def test_nothing_of_the_tuner_is_imported_or_named_by_path(path, repository):
    text = path.read_text(encoding="utf-8")
    roots = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert roots == {"inspect", "torch"}
    assert str(repository) not in text and "/home" not in text


def test_it_can_be_imported_twice_and_executed_as_kernelbench_does(path, new):
    second = imported(path, "exported_twice")
    context: dict = {}
    exec(compile(path.read_text(encoding="utf-8"), "<string>", "exec"), context)
    x = torch.randn(6, 5)
    outputs = []
    for model_class in (new.ModelNew, second.ModelNew, context["ModelNew"]):
        torch.manual_seed(3)
        outputs.append(model_class(*context["get_init_inputs"]())(x))
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])


def test_hostile_lines_stay_in_the_header_as_one_comment_each(path):
    text = path.read_text(encoding="utf-8")
    header = text.split("\n\nimport inspect\n")[0].rstrip("\n")
    assert all(
        line.startswith("#") for line in re.split(r"[\n\r\x0b\x0c\x85\u2028\u2029]", header)
    )
    assert "\x00" not in text and "\u202e" not in text
    assert "# two\\nlines" in header and "naïve 中文 ⚡" in header
    assert "# import os; os.abort()" in header
    assert static_errors(text, "cpp") == []
    without = [line for line in text_of().splitlines() if not line.startswith("#")]
    assert [line for line in text.splitlines() if not line.startswith("#")] == without


def test_the_header_tells_what_it_replaces_and_needs(path):
    header = path.read_text(encoding="utf-8").split("\nimport inspect\n")[0]
    for words in ("Replaces: torch.nn.Linear", "Template: cpu", "Deterministic: yes", "Needs:"):
        assert words in header


def test_sizes_in_force_are_those_of_the_file(new):
    (x,) = new.get_inputs()
    assert x.shape == (6, 5)
    assert new.get_init_inputs() == [5, 7, (7,)]
    assert new.scale_shape == (7,)  # what follows from a size follows the new one


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("n = 1", {"n": 9}),
        ("n: int = 1", {"n": 9}),
        ("n = other = 1", {"n": 9, "other": 1}),
        ("n, other = 1, 2", {"n": 9, "other": 2}),
        ("n = 1\nother = n + 1", {"n": 9, "other": 10}),
        ("n = 1\nn *= 2", {"n": 9}),
        ("if True:\n    n = 1", {"n": 9}),
        ("def f():\n    n = 1\n    return n\nn = 3\nother = f()", {"n": 9, "other": 1}),
    ],
)
def test_a_size_is_overridden_wherever_the_file_assigns_it(line, expected):
    from tuner.export import _inputs

    space: dict = {}
    exec(_inputs(f'"""Doc."""\nfrom __future__ import annotations\n{line}\n', {"n": 9}), space)
    assert {name: space[name] for name in expected} == expected


def test_the_references_model_stays_behind_and_its_helpers_come_along():
    reference = load_family(OP).reference.read_text() + "\n\ndef helper():\n    return 1\n"
    text = text_of(reference=reference)
    classes = [node.name for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    assert classes == ["ModelNew"]
    assert "def helper" in text


def test_a_fallback_is_the_reference_itself_at_the_sizes_in_force(tmp_path):
    family = load_family(OP)
    reference = family.reference.read_text()
    text = fallback_text(family, reference=reference, sizes=SIZES, provenance=HOSTILE)
    path = tmp_path / "model_new.py"
    path.write_text(text, encoding="utf-8")
    module = imported(path, "fallback")
    (x,) = module.get_inputs()
    assert x.shape == (SIZES["batch"], SIZES["in_features"])
    model = module.ModelNew(*module.get_init_inputs())
    expected = load_problem(family.reference, SIZES).make_model(0, "cpu")
    model.load_state_dict(expected.state_dict(), strict=True)
    assert torch.equal(model(x), expected(x))
    assert not re.search(r"\bpass\b", text)


def test_two_exports_never_share_a_library():
    names = [
        re.search(r"TORCH_LIBRARY\((\w+),", text_of(**changes))[1]
        for changes in ({}, {"flags": ["-O1"]}, {"flags": ["-O2"]}, {"provenance": ["x"]})
    ]
    assert len(set(names)) == 3 and names[0] == names[3]  # a comment changes nothing compiled


def test_a_family_that_cannot_be_exported_is_refused(tmp_path):
    family = load_family(OP)
    (tmp_path / OP).mkdir()
    for broken, reason in (("class :\n", "not Python"), ("x = '\x00'\n", "not Python")):
        (tmp_path / OP / "model_new.py").write_text(broken)
        family = load_family(OP, [tmp_path])
        with pytest.raises(TemplateError, match=reason):
            export_text(
                family,
                family.render({"template": "cpu"}),
                reference="",
                sizes={},
                flags=[],
                provenance=[],
            )


# ---- KernelBench's static rules -------------------------------------------------------------


def static_errors(text: str, language: str) -> list[str]:
    """KernelBench's static checker, as documented: regular expressions over the file."""
    code = "\n".join(re.sub(r"(#|//).*", "", line) for line in text.splitlines())
    rules = {
        "the word pass": re.search(r"\bpass\b", text),  # we keep it out of comments, too
        "try": re.search(r"\btry\s*:", code),
        "except": re.search(r"\bexcept\b", code),
    }
    if language == "cuda":
        rules["no __global__"] = not re.search(r"__global__\s+void\s+", code)
    if language == "triton":
        rules["no triton kernel"] = "@triton.jit" not in code and "@triton.autotune" not in code
        rules["no triton operation"] = not re.search(r"\btl\.\w+", code)
    else:
        rules["no load_inline"] = not re.search(r"\bload_inline\b", code)
    return [name for name, is_broken in rules.items() if is_broken]


TEMPLATES = [
    (name, template) for name in family_names() for template in load_family(name).templates
]


@pytest.mark.parametrize(("name", "template"), TEMPLATES)
def test_every_template_obeys_kernelbenchs_static_rules(name, template):
    family = load_family(name)
    candidate = family.render({"template": template}, FACTS)
    text = export_text(
        family,
        candidate,
        reference=family.reference.read_text(),
        sizes={},
        flags=["-O3"],
        provenance=[],
    )
    assert static_errors(text, candidate.language) == []


def test_the_static_rules_find_what_they_look_for():
    text = "# two-pass\ntry:\n    x\nexcept E:\n    y\n"
    assert static_errors(text, "cuda") == [
        "the word pass",
        "try",
        "except",
        "no __global__",
        "no load_inline",
    ]


# ---- drop-in: modes, buffers, state ---------------------------------------------------------


def test_equal_seeds_give_equal_weights_and_outputs(pair):
    assert_same_state(pair.ours, pair.theirs)
    assert_close(pair.ours(pair.x), pair.theirs(pair.x))


def test_running_statistics_follow_the_reference_also_without_gradients(pair):
    for k in range(3):
        x = torch.randn(6, 5) + k
        assert_close(pair.ours(x), pair.theirs(x))
        with torch.no_grad():
            assert_close(pair.ours(x), pair.theirs(x))
        assert_same_state(pair.ours, pair.theirs)
    assert pair.ours.bn.num_batches_tracked == 6


def test_eval_mode_uses_the_running_statistics_and_changes_nothing(pair):
    pair.ours(pair.x), pair.theirs(pair.x)
    before = copy.deepcopy(pair.ours.state_dict())
    assert_close(pair.ours.eval()(pair.x), pair.theirs.eval()(pair.x))
    assert_close(pair.ours(pair.x[:1]), pair.theirs(pair.x[:1]))
    assert all(torch.equal(before[name], value) for name, value in pair.ours.state_dict().items())
    pair.ours.train(), pair.theirs.train()
    assert_close(pair.ours(pair.x), pair.theirs(pair.x))


@pytest.mark.parametrize("change", ["frozen bn", "momentum", "untracked", "no affine", "tiny eps"])
def test_settings_of_the_batchnorm_behave_as_pytorchs(pair, change):
    for model in (pair.ours, pair.theirs):
        if change == "frozen bn":
            model(pair.x)
            model.bn.eval()
        if change == "momentum":
            model.bn.momentum = None
        if change == "untracked":
            model.bn = torch.nn.BatchNorm1d(7, track_running_stats=False)
        if change == "no affine":
            model.bn = torch.nn.BatchNorm1d(7, affine=False)
        if change == "tiny eps":
            model.bn.eps = 1e-12
    for _ in range(3):
        x = torch.randn(6, 5)
        assert_close(pair.ours(x), pair.theirs(x))
        assert_same_state(pair.ours, pair.theirs)


def test_state_dict_loads_strictly_both_ways(new, problem, pair):
    pair.theirs(pair.x), pair.ours(torch.randn(6, 5))
    fresh = new.ModelNew(*new.get_init_inputs())
    assert str(fresh.load_state_dict(pair.theirs.state_dict(), strict=True)).startswith("<All")
    assert_same_state(fresh, pair.theirs)
    assert_close(fresh(pair.x), pair.theirs(pair.x))
    back = problem.module.Model(*problem.module.get_init_inputs())
    back.load_state_dict(pair.ours.state_dict(), strict=True)
    assert_same_state(pair.ours, back)
    assert_close(pair.ours(pair.x), back(pair.x))


def test_weights_are_read_afresh_at_every_call(pair):
    ours = torch.optim.SGD(pair.ours.parameters(), lr=0.5)
    theirs = torch.optim.SGD(pair.theirs.parameters(), lr=0.5)
    for _ in range(3):
        for model, optimiser in ((pair.ours, ours), (pair.theirs, theirs)):
            optimiser.zero_grad()
            model(pair.x).square().mean().backward()
            optimiser.step()
    assert_same_state(pair.ours, pair.theirs)
    for model in (pair.ours, pair.theirs):
        model.scale.data.copy_(torch.tensor([0.0, -1.0, 1e-4, 2.0, -3.0, 1.0, 5.0]))
        model.bn.weight.data.fill_(1e-6)
    assert_close(pair.ours(pair.x), pair.theirs(pair.x))


def test_deepcopies_and_pickles_are_models_of_their_own(pair):
    twin = copy.deepcopy(pair.ours)
    buffer = io.BytesIO()
    torch.save(pair.ours.state_dict(), buffer)
    assert_close(twin(pair.x), pair.theirs(pair.x))
    assert pair.ours.bn.num_batches_tracked == 0 and twin.bn.num_batches_tracked == 1
    pair.theirs.bn.reset_running_stats()
    assert_close(pair.ours(pair.x), pair.theirs(pair.x))


def test_double_gives_the_references_double(pair):
    x = pair.x.double()
    ours, theirs = pair.ours.double()(x), pair.theirs.double()(x)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_autocast_gives_the_references_dtype(pair):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = pair.ours(pair.x), pair.theirs(pair.x)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)


# ---- drop-in: wrong inputs ------------------------------------------------------------------


def test_one_row_in_training_is_pytorchs_own_error(pair):
    errors = []
    for model in (pair.theirs, pair.ours):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel") as caught:
            model(pair.x[:1])
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


def test_no_rows_give_what_pytorch_gives(pair):
    ours, theirs = pair.ours(pair.x[:0]), pair.theirs(pair.x[:0])
    assert ours.shape == theirs.shape == (0, 7)
    assert_same_state(pair.ours, pair.theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_a_wrong_dtype_is_a_runtime_error_that_names_both(pair, dtype):
    with pytest.raises(RuntimeError) as caught:
        pair.ours(pair.x.to(dtype))
    assert str(dtype) in str(caught.value) and "torch.float32" in str(caught.value)


def test_a_wrong_feature_count_is_a_runtime_error_that_names_both(pair):
    with pytest.raises(RuntimeError, match=r"(?s)9.*5"):
        pair.ours(torch.randn(6, 9))
    assert pair.ours.bn.num_batches_tracked == 0


# ---- drop-in: shapes, strides, values -------------------------------------------------------


@pytest.mark.parametrize("num_rows", [2, 3, 17, 65, 257])
def test_other_batch_sizes_are_right(pair, num_rows):
    x = torch.randn(num_rows, 5)
    if num_rows == 2:  # two close rows would divide by next to nothing
        x = torch.stack([torch.linspace(-2, 2, 5), torch.linspace(2, 1, 5)])
    assert_close(pair.ours(x), pair.theirs(x))


@pytest.mark.parametrize("kind", ["transposed", "strided", "expanded", "offset"])
def test_strides_and_offsets_do_not_matter(pair, kind):
    x = {
        "transposed": torch.randn(5, 6).t(),
        "strided": torch.randn(6, 10)[:, ::2],
        "expanded": torch.randn(6, 1).expand(6, 5),
        "offset": torch.randn(31)[1:].view(6, 5),
    }[kind]
    assert_close(pair.ours(x), pair.theirs(x))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_value_poisons_what_it_poisons_in_the_reference(pair, bad):
    pair.x[2, 3] = bad
    for model in (pair.ours, pair.theirs):
        model.gemm.weight.data[4, 3] = 0.0
    ours, theirs = pair.ours(pair.x), pair.theirs(pair.x)
    assert torch.equal(torch.isnan(ours), torch.isnan(theirs)) and torch.isnan(ours).any()
    assert_close(ours, theirs)


def test_a_bad_weight_poisons_its_own_column_alone(pair):
    for model in (pair.ours, pair.theirs):
        model.gemm.weight.data[4, 3] = float("nan")
    ours, theirs = pair.ours(pair.x), pair.theirs(pair.x)
    assert torch.isnan(ours).all(0).tolist() == [column == 4 for column in range(7)]
    assert_close(ours, theirs)


def test_offset_and_constant_columns_are_right(pair):
    x = pair.x + 100
    exact = copy.deepcopy(pair.theirs).double()(x.double())
    error = (pair.ours(x) - exact).abs().max()
    assert error <= 2 * (pair.theirs(x) - exact).abs().max() + 1e-5
    constant = torch.full((6, 5), 3.0)
    exact = copy.deepcopy(pair.theirs).double()(constant.double())
    assert (pair.ours(constant) - exact).abs().max() < 1e-2  # 1/sqrt(eps) magnifies rounding


def test_the_same_input_gives_the_same_bits_and_never_the_same_memory(pair, new):
    twin = copy.deepcopy(pair.ours)
    first = pair.ours(pair.x)
    kept = first.clone()
    second, third = pair.ours(pair.x), twin(pair.x + 1)
    assert torch.equal(first, kept) and torch.equal(first, second)
    assert len({t.data_ptr() for t in (first, second, third, pair.x)}) == 4
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(pair.ours(pair.x), kept)
    finally:
        torch.use_deterministic_algorithms(False)


def test_inputs_and_weights_are_left_as_they_were(pair):
    x = pair.x.clone()
    before = [p.detach().clone() for p in pair.ours.parameters()]
    pair.ours(pair.x).sum().backward()
    assert torch.equal(x, pair.x)
    assert all(torch.equal(a, b) for a, b in zip(before, pair.ours.parameters(), strict=True))


# ---- drop-in: autograd ----------------------------------------------------------------------


def test_gradients_are_the_references(pair):
    upstream = torch.randn(6, 7)
    found = []
    for model in (pair.ours, pair.theirs):
        x = pair.x.clone().requires_grad_()
        (model(x) * upstream).sum().backward()
        found.append({"x": x.grad, **{n: p.grad for n, p in model.named_parameters()}})
    assert found[0].keys() == found[1].keys()
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=1e-3, atol=1e-4, msg=name)
    assert found[0]["gemm.bias"].abs().max() < 1e-4  # mathematically zero


def test_frozen_parameters_get_no_gradient_and_the_others_do(pair):
    pair.ours.gemm.requires_grad_(False)
    pair.ours(pair.x).sum().backward()
    assert pair.ours.gemm.weight.grad is None
    assert pair.ours.scale.grad is not None and pair.ours.bn.weight.grad is not None


def test_an_output_is_never_silently_detached(pair):
    assert pair.ours(pair.x).requires_grad
    with torch.no_grad():
        assert not pair.ours(pair.x).requires_grad
    with torch.inference_mode():
        assert pair.ours(pair.x).is_inference()


def test_it_compiles_into_one_graph(pair):
    compiled = torch.compile(copy.deepcopy(pair.ours), fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_close(compiled(pair.x), pair.theirs(pair.x))
    assert_same_state(compiled._orig_mod, pair.theirs)


def test_pytorchs_own_check_of_operators_finds_nothing(new, pair):
    model = pair.ours
    tensors = (model.gemm.weight, model.gemm.bias, model.scale, model.bn.weight, model.bn.bias)
    args = (pair.x.requires_grad_(), *(t.detach().requires_grad_() for t in tensors), 1e-5)
    report = torch.library.opcheck(new.fused_op.default, args)
    assert set(report.values()) == {"SUCCESS"}
