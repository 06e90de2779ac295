"""The reference file: what is loaded, what is drawn from it, and what is said when it is wrong."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import get_args

import pytest
import torch

from tuner.errors import ProblemError
from tuner.problem.draws import Distribution, draws_all, redistributed
from tuner.problem.reference import load_problem

FLAGSHIP = """
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, in_features, out_features, scale_shape, eps=1e-5, momentum=0.1):
        super(Model, self).__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(scale_shape))
        self.bn = nn.BatchNorm1d(out_features, eps=eps, momentum=momentum)

    def forward(self, x):
        x = self.gemm(x)
        x = x * self.scale
        x = self.bn(x)
        return x


batch_size = 64
in_features = 48
out_features = 40
scale_shape = (out_features,)


def get_inputs():
    return [torch.rand(batch_size, in_features)]


def get_init_inputs():
    return [in_features, out_features, scale_shape]
"""


@pytest.fixture
def flagship(tmp_path):
    return load_problem(write(tmp_path, FLAGSHIP))


def write(folder: Path, text: str) -> Path:
    path = folder / "reference.py"
    path.write_text(text)
    return path


def test_loading_keeps_text_hash_and_sizes(flagship):
    assert flagship.text == FLAGSHIP
    assert flagship.sha256 == hashlib.sha256(FLAGSHIP.encode()).hexdigest()
    assert flagship.sizes == {"batch_size": 64, "in_features": 48, "out_features": 40}
    assert flagship.num_rows() == 64


def test_sizes_reach_what_the_file_computes_from_them(tmp_path):
    problem = load_problem(write(tmp_path, FLAGSHIP), {"out_features": 12, "batch_size": 5})
    assert problem.module.scale_shape == (12,)
    assert problem.make_model(0).scale.shape == (12,)
    assert problem.make_inputs(0)[0].shape == (5, 48)
    assert problem.sizes["out_features"] == 12


def test_sizes_win_over_tuple_annotated_and_chained_assignments(tmp_path):
    head = "m, n = 3, 4\nk: int = 5\np = q = 6\nif True:\n    n += 1\nboth = (m, n, k, p, q)\n"
    sizes = {"m": 30, "n": 40, "k": 50, "q": 60}
    problem = load_problem(write(tmp_path, head + FLAGSHIP), sizes)
    assert problem.module.both == (30, 40, 50, 6, 60)


def test_a_local_variable_of_the_same_name_is_left_alone(tmp_path):
    text = FLAGSHIP + "\ndef f():\n    batch_size = 3\n    return batch_size\nseven = f() + 4\n"
    assert load_problem(write(tmp_path, text), {"batch_size": 9}).sizes["seven"] == 7


def test_an_unknown_size_names_the_known_ones_and_the_nearest(tmp_path):
    with pytest.raises(ProblemError) as error:
        load_problem(write(tmp_path, FLAGSHIP), {"out_feature": 12})
    assert "unknown size 'out_feature'" in str(error.value)
    assert "known: batch_size, in_features, out_features" in str(error.value)
    assert "did you mean 'out_features'?" in str(error.value)


def line_of(text: str, part: str) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if part in line)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Model(:\n", "reference.py:1: the reference is not valid Python"),
        ("x = 1\nx = x / 0\n", "reference.py:2: importing the reference failed: ZeroDivision"),
        ("import no_such_module_at_all\n", "reference.py:1: importing the reference failed"),
        (
            "import sys\nsys.exit(0)\n",
            "reference.py:2: importing the reference failed: SystemExit",
        ),
        ("x = 1\n", "no class 'Model'"),
        ("x = 1\n", "got: none"),
        (FLAGSHIP.replace("def get_inputs", "def get_input"), "got: Model, get_input, get_init"),
        (FLAGSHIP.replace("class Model", "class Net"), "got: Net, get_inputs, get_init"),
    ],
)
def test_a_broken_file_is_explained_with_its_line(tmp_path, text, says):
    with pytest.raises(ProblemError) as error:
        load_problem(write(tmp_path, text))
    assert says in str(error.value)


def test_a_constructor_without_arguments_needs_no_function_for_them(tmp_path):
    text = FLAGSHIP.replace("def get_init_inputs", "def init")
    problem = load_problem(write(tmp_path, text))
    assert problem.init_inputs(0) == []
    with pytest.raises(ProblemError, match=r"Model.*missing 3 required positional arguments"):
        problem.make_model(0)
    text = "import torch\nclass Model(torch.nn.Module):\n    def forward(self, x): return x + 1\n"
    text += "def get_inputs(): return [torch.ones(3)]\n"
    problem = load_problem(write(tmp_path, text))
    (found,) = problem.call(problem.make_model(0), problem.make_inputs(0))
    assert found.tolist() == [2.0] * 3


def test_a_missing_file_and_a_binary_one_are_explained(tmp_path):
    with pytest.raises(ProblemError, match="cannot read the reference: No such file"):
        load_problem(tmp_path / "none.py")
    (tmp_path / "reference.py").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProblemError, match="not a text file"):
        load_problem(tmp_path / "reference.py")


def test_a_failing_get_inputs_names_file_and_line(tmp_path):
    text = FLAGSHIP.replace("torch.rand(batch_size, in", "torch.rand(-batch_size, in")
    problem = load_problem(write(tmp_path, text))
    with pytest.raises(ProblemError) as error:
        problem.make_inputs(0)
    line = line_of(text, "torch.rand(")
    assert f"reference.py:{line}: get_inputs() failed: RuntimeError" in str(error.value)


def test_a_failing_model_names_file_and_line(tmp_path):
    text = FLAGSHIP.replace("x = x * self.scale", "x = x * self.skale")
    problem = load_problem(write(tmp_path, text))
    with pytest.raises(ProblemError) as error:
        problem.call(problem.make_model(0), problem.make_inputs(0))
    line = line_of(text, "self.skale")
    assert f"reference.py:{line}: Model.forward failed: AttributeError" in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("return x\n", "return 3.0\n", "Model.forward returned float; expected a tensor"),
        ("return [in_features", "return 5 or [in_features", "returned int; expected a list"),
        ("class Model(nn.Module)", "class Model(dict)", "Model is not a torch.nn.Module"),
    ],
)
def test_a_wrong_kind_of_answer_is_explained(tmp_path, old, new, says):
    problem = load_problem(write(tmp_path, FLAGSHIP.replace(old, new)))
    with pytest.raises(ProblemError) as error:
        problem.call(problem.make_model(0), problem.make_inputs(0))
    assert says in str(error.value)


def test_two_files_do_not_share_a_namespace(tmp_path):
    first = load_problem(write(tmp_path, FLAGSHIP))
    second = load_problem(write(tmp_path, FLAGSHIP), {"batch_size": 3})
    assert (first.num_rows(), second.num_rows()) == (64, 3)


def test_equal_seeds_give_equal_models_and_inputs_as_kernelbench_draws_them(flagship):
    model = flagship.make_model(42)
    torch.manual_seed(42)
    plain = flagship.module.Model(*flagship.module.get_init_inputs())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    (mine,) = flagship.make_inputs(7)
    torch.manual_seed(7)
    assert torch.equal(mine, flagship.module.get_inputs()[0])
    assert not torch.equal(flagship.make_inputs(8)[0], flagship.make_inputs(7)[0])
    assert model.training


def test_inputs_belong_to_the_caller(flagship):
    flagship.make_inputs(3)[0].zero_()
    assert flagship.make_inputs(3)[0].sum() > 0


@pytest.mark.parametrize(
    ("forward", "shapes", "with_rows"),
    [
        ("a @ b", [(6, 6), (6, 6)], [True, False]),
        ("a @ b", [(6, 7), (7, 6)], [True, False]),
        ("(a * b).mean()", [(6, 6), (6,)], [True, False]),
        ("(a * b * c[:, None]).sum()", [(6, 6), (6, 6), (6,)], [True, True, True]),
        ("a @ b + c", [(6, 6), (6, 6), (6, 6)], [True, False, True]),
        ("torch.bmm(a, b)", [(6, 6, 6), (6, 6, 6)], [True, True]),
        ("torch.cdist(a, b)", [(6, 5), (6, 5)], [True, True]),
        ("a.reshape(36)", [(6, 6)], [True]),  # takes no other batch
        ("a * b", [(6, 6), ()], [True, False]),
    ],
)
def test_inputs_have_rows_where_forward_takes_others(tmp_path, forward, shapes, with_rows):
    names = ", ".join("abc"[: len(shapes)])
    given = ", ".join(f"torch.rand({shape})" for shape in shapes)
    text = f"""
import torch

class Model(torch.nn.Module):
    def forward(self, {names}):
        return {forward}

def get_inputs():
    return [{given}]

def get_init_inputs():
    return []
"""
    problem = load_problem(write(tmp_path, text))
    assert problem.with_rows() == tuple(with_rows)
    for inputs in (problem.make_inputs(0, batch=4), problem.stand_ins(4)):
        found = [tuple(x.shape) for x in inputs]
        pairs = zip(shapes, with_rows, strict=True)
        assert found == [(4, *shape[1:]) if has else shape for shape, has in pairs]


@pytest.mark.parametrize("batch", [0, 1, 33, 64, 65, 200])
def test_any_batch_has_fresh_rows(flagship, batch):
    (x,) = flagship.make_inputs(1, batch=batch)
    assert x.shape == (batch, 48)
    assert len({tuple(row) for row in x.tolist()}) == batch


def test_only_tensors_with_the_batch_are_resized(tmp_path):
    text = FLAGSHIP.replace(
        "return [torch.rand(batch_size, in_features)]",
        "return [torch.rand(batch_size, 3), torch.arange(batch_size), torch.rand(5), 2.5]",
    )
    inputs = load_problem(write(tmp_path, text)).make_inputs(0, batch=9, distribution="offset")
    assert [tuple(x.shape) for x in inputs[:3]] == [(9, 3), (9,), (5,)]
    assert inputs[1].dtype == torch.int64
    assert torch.equal(inputs[1], torch.arange(9))
    assert inputs[0].min() >= 100
    assert inputs[2].min() >= 100
    assert inputs[3] == 2.5


def test_distributions_have_what_their_names_say(flagship):
    def drawn(distribution):
        return flagship.make_inputs(5, distribution=distribution, batch=256)[0]

    as_given = drawn("as_given")
    assert torch.equal(drawn("offset"), as_given + 100)
    assert drawn("heavy_tailed").isfinite().all()
    assert drawn("heavy_tailed").abs().max() > 50 > 3 * drawn("heavy_tailed").abs().median()
    rows = drawn("wide_range").abs().amax(1)
    assert rows.max() / rows.min() > 2**30
    columns = drawn("wide_columns").abs().amax(0)
    assert columns.max() / columns.min() > 2**30
    assert torch.equal(drawn("tiny"), as_given / 1024)
    constant = drawn("constant_columns")
    assert (constant == constant[0]).all()
    assert constant.unique().numel() > 4
    assert drawn("nan_row").isnan().all(1).sum() == 1
    assert drawn("nan_row").isnan().sum() == 48
    infinite = drawn("inf_elements")
    assert infinite.isposinf().sum() == infinite.isneginf().sum() == 1
    assert drawn("huge").abs().median() > 2**24 and drawn("vast").isfinite().all()
    denormal = drawn("denormal").abs() < torch.finfo(torch.float32).tiny
    assert denormal.float().mean() > 0.9 and drawn("denormal").count_nonzero() > 12_000
    assert abs(float(drawn("normal").mean())) < 0.05


@pytest.mark.parametrize("name", get_args(Distribution))
def test_what_draws_all_numbers_does_not_depend_on_those_that_are_given(name):
    def made(given: torch.Tensor) -> torch.Tensor:
        return redistributed(given, name, torch.Generator().manual_seed(3))

    some, others = torch.rand(64, 12), torch.rand(64, 12)
    assert torch.equal(made(some), made(others)) == draws_all(name)


def test_inputs_in_another_order_of_memory_have_all_distributions(tmp_path):
    """Channels last, of one row in all places, and every other column: they ended the check."""
    file = tmp_path / "strided.py"
    file.write_text("""
import torch

class Model(torch.nn.Module):
    def forward(self, image, row, columns, plain):
        return image.mean() + row.sum() + columns.sum() + plain.sum()

def get_inputs():
    image = torch.randn(4, 6, 5, 3).to(memory_format=torch.channels_last)
    return [image, torch.randn(1, 7).expand(4, 7), torch.randn(4, 8)[:, ::2], torch.randn(4, 2)]

def get_init_inputs():
    return []
""")
    problem = load_problem(file)
    assert problem.strided() == [0, 1, 2]
    for distribution in get_args(Distribution):
        for batch in (None, 3, 6):
            for x in problem.make_inputs(1, distribution=distribution, batch=batch):
                assert x.is_contiguous() and len(x) == (batch or 4)


def test_an_unknown_distribution_is_a_programming_error(flagship):
    with pytest.raises(ValueError, match="unknown distribution 'x'"):
        flagship.make_inputs(0, distribution="x")


def test_randomise_gives_every_weight_and_buffer_a_fresh_value(flagship):
    before = flagship.make_model(1).state_dict()
    model = flagship.randomise(flagship.make_model(1), 9)
    for name, tensor in model.state_dict().items():
        assert not torch.equal(tensor, before[name]), name
        assert tensor.double().isfinite().all()
    assert (model.bn.running_var > 0).all()
    assert int(model.bn.num_batches_tracked) == 7
    for vector in (model.scale, model.bn.weight):
        assert (vector == 0).sum() == 1
        assert (vector < -0.05).any()
        assert ((vector.abs() > 0) & (vector.abs() < 1e-5)).sum() == 1


def test_trained_weights_are_near_what_they_were_and_have_outliers(flagship):
    made = flagship.make_model(1)
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    after = flagship.randomise(made, 9, "trained").state_dict()
    weight, rms = after["gemm.weight"], float(before["gemm.weight"].square().mean().sqrt())
    usual = weight[weight.abs() < 5 * rms]
    assert float(usual.square().mean().sqrt()) == pytest.approx(rms, rel=0.2)
    assert 0.002 < 1 - usual.numel() / weight.numel() < 0.012  # 1 % times 10, some of them small
    gamma, beta = after["bn.weight"], after["bn.bias"]
    assert float(gamma.median()) == pytest.approx(1.0, abs=0.2) and float(gamma.std()) > 0.2
    assert abs(float(beta.median())) < 0.2 and float(beta.std()) > 0.2
    assert (after["bn.running_var"] > 0).all()


def test_randomise_depends_on_names_and_seed_only(flagship):
    one = flagship.randomise(flagship.make_model(1), 9).state_dict()
    two = flagship.randomise(flagship.make_model(2), 9).state_dict()
    other = flagship.randomise(flagship.make_model(1), 10).state_dict()
    assert torch.equal(one["scale"], two["scale"])
    assert torch.equal(one["gemm.bias"], two["gemm.bias"])
    assert not torch.equal(one["scale"], other["scale"])


def test_dyadic_weights_make_sums_exact(flagship):
    model = flagship.randomise(flagship.make_model(1), 9, "dyadic")
    (x,) = flagship.make_inputs(2, distribution="constant_columns")
    z = model.gemm(x) * model.scale
    wide = (x.double() @ model.gemm.weight.double().T + model.gemm.bias) * model.scale.double()
    assert torch.equal(z.double(), wide)


# ---- inputs that are large --------------------------------------------------------------------

LARGE = FLAGSHIP.replace("batch_size = 64", "batch_size = 2**20")
OF_NUMPY = FLAGSHIP.replace("    return [torch", "    import numpy as np\n    return [torch")


def test_forms_and_stand_ins_of_large_inputs_draw_nothing(tmp_path, monkeypatch):
    problem = load_problem(write(tmp_path, LARGE))
    monkeypatch.setattr(problem._given, "_whole", None)  # a draw would fail
    assert problem.num_rows() == 2**20
    assert [tuple(x.shape) for x in problem.stand_ins()] == [(2**20, 48)]
    assert [tuple(x.shape) for x in problem.stand_ins(7)] == [(7, 48)]
    assert problem.stand_ins(7)[0].device.type == "cpu"


def test_inputs_whose_numbers_are_all_drawn_are_not_asked_for(tmp_path, monkeypatch):
    problem = load_problem(write(tmp_path, LARGE))
    monkeypatch.setattr(problem._given, "_whole", None)  # a draw would fail
    some, others = (problem.make_inputs(n, distribution="normal", batch=5)[0] for n in (3, 4))
    assert some.shape == others.shape == (5, 48) and not torch.equal(some, others)
    with pytest.raises(TypeError):
        problem.make_inputs(3, distribution="offset", batch=5)


def test_stand_ins_of_small_inputs_are_a_draw(flagship):
    assert torch.equal(flagship.stand_ins(3)[0], flagship.make_inputs(0, batch=3)[0])


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inputs_are_drawn_on_the_device_where_get_inputs_can_do_that(tmp_path, device):
    problem = load_problem(write(tmp_path, FLAGSHIP))
    drawn = problem._given.drawn(3, 70, device)
    assert [(tuple(x.shape), x.device.type) for x in drawn] == [((70, 48), device)]
    assert not problem._given._is_drawn_on_cpu


def test_inputs_for_which_memory_ran_out_are_not_drawn_on_the_cpu_from_then_on(
    tmp_path, monkeypatch
):
    """On an H200 that was full, one question after another took 10 s for 6 GB of a CPU's."""
    problem = load_problem(write(tmp_path, FLAGSHIP))
    problem._given.forms()  # which are asked for once
    ask, devices = problem._given._ask, []

    def get_inputs():
        devices.append(torch.empty(0).device.type)
        if len(devices) == 1:
            raise ProblemError("get_inputs failed: OutOfMemoryError: CUDA out of memory")
        return ask()

    monkeypatch.setattr(problem._given, "_ask", get_inputs)
    with pytest.raises(ProblemError, match="out of memory"):
        problem._given.drawn(3, None, "meta")
    problem._given.drawn(3, None, "meta")
    assert devices == ["meta", "meta"]


def test_inputs_that_are_made_of_numpys_numbers_are_moved(tmp_path):
    text = (
        FLAGSHIP[: FLAGSHIP.index("def get_inputs")]
        + """
def get_inputs():
    import numpy as np
    made = torch.from_numpy(np.ones((batch_size, in_features), dtype=np.float32))
    return [torch.zeros(in_features) + made]


def get_init_inputs():
    return [in_features, out_features, scale_shape]
"""
    )
    problem = load_problem(write(tmp_path, text))
    assert problem.num_rows() == 64
    assert problem.make_model(0)(problem.make_inputs(0)[0]).shape == (64, 40)


def test_a_model_without_memory_has_the_forms_of_the_reference(flagship):
    blank, real = flagship.model_without_memory(), flagship.make_model(0)
    assert {x.device.type for x in blank.state_dict().values()} == {"meta"}
    assert {n: x.shape for n, x in blank.state_dict().items()} == {
        n: x.shape for n, x in real.state_dict().items()
    }
    assert blank.training == real.training
