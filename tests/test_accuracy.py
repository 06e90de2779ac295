from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from tuner.errors import ProblemError
from tuner.problem.accuracy import Accuracy, math_mode


def test_accuracy_is_read_from_words_pairs_and_mappings():
    assert Accuracy.parse("float32") == Accuracy("float32")
    assert Accuracy.parse(" TF32 ") == Accuracy("tf32")
    assert Accuracy.parse("pytorch").label == "pytorch"
    assert Accuracy.parse("1e-4,2e-3") == Accuracy("tolerance", 1e-4, 2e-3)
    assert Accuracy.parse({"atol": 1e-4, "rtol": "1e-3"}) == Accuracy("tolerance", 1e-3, 1e-4)


def test_accuracy_labels_are_short():
    assert Accuracy.parse("1e-4,1e-4").label == "rtol=1e-4,atol=1e-4"
    assert Accuracy.parse({"rtol": 0.1, "atol": 2.5e-5}).label == "rtol=0.1,atol=2.5e-5"
    assert Accuracy("float32").label == "float32"


@given(st.floats(0, 0.1), st.floats(1e-300, 0.1))
def test_accuracy_labels_are_read_back_without_losing_a_digit(rtol, atol):
    accuracy = Accuracy("tolerance", rtol, atol)
    assert Accuracy.parse(accuracy.label) == accuracy


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("flot32", "did you mean 'float32'"),
        ("1e-4", "expected 'float32'"),
        ("a,b", "'a' is no number"),
        ({"rtol": 1e-4}, "'atol' is missing"),
        ({"rtol": 1e-4, "atol": 1e-4, "tol": 1}, "unknown 'tol'"),
        ({"rtol": True, "atol": 1e-4}, "True is no number"),
        ({"rtol": -1e-4, "atol": 1e-4}, "expected 0 <= rtol"),
        ({"rtol": "nan", "atol": 1e-4}, "expected 0 <= rtol"),
        ("0.99,1e30", "got rtol=0.99, atol=1e+30; larger tolerances accept wrong answers"),
        ({"rtol": 0.11, "atol": 0.0}, "expected 0 <= rtol <= 0.1"),
        ({"rtol": 0.0, "atol": 0.11}, "0 <= atol <= 0.1"),
        ("0,0", "both 0"),
        (3, "got 3"),
    ],
)
def test_a_wrong_accuracy_is_explained(value, says):
    with pytest.raises(ValueError, match="accuracy") as error:
        Accuracy.parse(value)
    assert says in str(error.value)


def test_tf32_is_refused_where_it_does_not_exist():
    with pytest.raises(ProblemError, match="tf32 is not available on cpu"):
        Accuracy("tf32").require_on("cpu")
    Accuracy("tf32").require_on("cuda:1")
    Accuracy("float32").require_on("cpu")


def test_a_class_says_in_words_what_it_accepts_and_what_math_mode_sets():
    words = {kind: Accuracy(kind).words for kind in ("float32", "tf32", "pytorch")}
    assert words == {
        "float32": "error at most twice PyTorch float32's own",
        "tf32": "error at most PyTorch TF32's own",
        "pytorch": "error at most twice PyTorch's own",
    }
    loose = Accuracy("tolerance", 1e-2, 1e-4)
    assert loose.words == "each element within 0.0001 + 0.01 times its value"
    said = {
        Accuracy("float32"): "float32, TF32 off",
        Accuracy("tf32"): "float32, TF32 on",
        Accuracy("pytorch"): "float32, TF32 off in matmul, on in cuDNN",
        loose: "float32, TF32 off",
    }
    for accuracy, words in said.items():
        assert accuracy.arithmetic == words
        with math_mode(accuracy):
            is_on = torch.get_float32_matmul_precision() == "high"
            assert accuracy.tf32 == (is_on, torch.backends.cudnn.allow_tf32)


def test_math_mode_is_put_back():
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32)
    with math_mode(Accuracy("tf32")):
        assert torch.get_float32_matmul_precision() == "high"
    with math_mode(Accuracy("float32")):
        assert not torch.backends.cudnn.allow_tf32
    with math_mode(Accuracy("pytorch")):  # as PyTorch is installed
        assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cudnn.allow_tf32
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == before
