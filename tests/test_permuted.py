"""What is permuted is read, or stored, where it lies: heads, patches, channels for a norm."""

from __future__ import annotations

import pytest
from interpreted import interpreted
from test_any_module import F, assert_as_exact, text_of_form
from test_in_place import forward_of
from test_ranges import check, check_each, needs_gpp, needs_triton
from test_steps import Taken, assert_gradients_are_as_exact

HEADS = "x.view(x.shape[0], 6, 3, {}).transpose(1, 2)"
PATCHES = (
    "x.reshape(x.shape[0], 3, 2, 4, 3, 5).permute(0, 2, 4, 3, 5, 1).reshape(x.shape[0], 6, 60)"
)
FORMS: dict[str, tuple[str, str, str]] = {
    "heads": (f"{HEADS.format(20)}.tanh() * y", "",
              "torch.randn(37, 6, 60), torch.randn(3, 1, 1)"),
    "heads and their norm": (
        f"{F}.rms_norm({HEADS.format(20)}, (20,)) * y", "",
        "torch.randn(37, 6, 60), torch.randn(3, 1, 20)",
    ),
    "one of three": (
        "(lambda q, k, v: q * k.sigmoid() + v)"
        "(*x.view(x.shape[0], 6, 3, 2, 20).permute(2, 0, 3, 1, 4))", "", "torch.randn(37, 6, 120)",
    ),
    "channels last for a norm": (
        f"{F}.layer_norm(torch.relu(x).permute(0, 2, 3, 1), (33,)) + y", "",
        "torch.randn(37, 33, 5, 7), torch.randn(33)",
    ),
    "channels first again": (
        "z + (y * x).permute(0, 3, 1, 2)", "",
        "torch.randn(37, 5, 7, 33), torch.randn(33), torch.randn(37, 33, 5, 7)",
    ),
    "pixel shuffle": (
        f"({F}.pixel_shuffle({F}.prelu(x, y), 2) + z).clamp(-1, 1)", "",
        "torch.randn(37, 12, 5, 18), torch.rand(1), torch.randn(37, 3, 10, 36)",
    ),
    "pixels apart": (
        f"{F}.pixel_unshuffle(x * y, 2).tanh()", "",
        "torch.randn(37, 3, 10, 36), torch.rand(3, 1, 1)",
    ),
    "patches": (f"{PATCHES}.tanh() + y", "", "torch.randn(37, 3, 8, 15), torch.randn(6, 60)"),
    "patches and their norm": (
        f"{F}.layer_norm({PATCHES}, (60,)) + y", "",
        "torch.randn(37, 3, 8, 15), torch.randn(6, 60)",
    ),
    "channels shuffled": (
        "(x * y).view(-1, 3, 2, 5, 7).transpose(1, 2).reshape(-1, 6, 5, 7).exp()", "",
        "torch.randn(37, 6, 5, 7), torch.randn(6, 1, 1)",
    ),
    "pixels as rows": (
        f"{F}.layer_norm(torch.relu(x).flatten(2).transpose(1, 2), (33,)) * y", "",
        "torch.randn(37, 33, 5, 7), torch.randn(35, 1)",
    ),
    "behind a softmax": (
        "torch.softmax(x, -1).transpose(1, 2) * y", "",
        "torch.randn(37, 9, 21), torch.randn(21, 1)",
    ),
    "the same in some rows": (
        "((x * y + y).flip(3).permute(0, 3, 1, 2) * z + z)[:, 1:] + 1.0", "",
        "torch.randn(37, 4, 8, 20), torch.randn(8, 20), torch.randn(20, 1, 8)",
    ),
    "beside itself": ("(x + x.transpose(1, 2)).exp()", "", "torch.randn(37, 19, 19)"),
    "means the other way": ("x.transpose(1, 2).exp().mean(-1)", "", "torch.randn(37, 9, 21)"),
    "there and back": (
        f"{F}.layer_norm((x * y).transpose(1, 2), (33,)).transpose(1, 2) + x", "",
        "torch.randn(37, 33, 21), torch.randn(33, 1)",
    ),
    "behind a product": (
        f"{F}.gelu(self.l(x).view(x.shape[0], 6, 3, 22).transpose(1, 2)) * y",
        "self.l = nn.Linear(20, 66)", "torch.randn(37, 6, 20), torch.randn(3, 1, 1)",
    ),
    "flipped": ("x.flip(-1) * y + x", "", "torch.randn(37, 6, 21), torch.randn(21)"),
    "flipped twice": ("(torch.relu(x).flip(1, 2) + y).exp()", "",
                      "torch.randn(37, 6, 21), torch.randn(21)"),
    "halves": (f"{HEADS.format(20)} * 0.5 + y", "",
               "torch.randn(37, 6, 60).half(), torch.randn(3, 1, 1).half()"),
    "in float64": (f"{HEADS.format(20)}.exp() * y", "",
                   "torch.randn(37, 6, 60).double(), torch.randn(3, 1, 1).double()"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_no_copy_is_made_and_a_search_tries_it(name, tmp_path):
    default, worth, own = forward_of(tmp_path, FORMS[name])
    assert "in_place" in worth
    assert len(own.calls) < len(default.calls)
    made = [call.function for call in own.calls]
    assert made == ["linear"] * (name == "behind a product"), made


@needs_gpp
@pytest.mark.parametrize("name", FORMS)
def test_the_loops_compute_what_the_module_does(name, tmp_path):
    check(tmp_path, name, FORMS[name], judge=assert_as_exact)


def check_triton(folder: str) -> None:
    """Compare Triton's kernels with PyTorch: in its interpreter where TRITON_INTERPRET is set."""
    check_each(FORMS, folder, assert_as_exact)


@needs_triton
def test_interpreted_blocks_compute_what_the_module_does(tmp_path):
    interpreted("test_permuted", "check_triton", str(tmp_path))


STEPS = [
    "heads", "one of three", "channels last for a norm", "channels first again", "pixel shuffle",
    "patches and their norm", "beside itself", "behind a product", "the same in some rows",
]  # fmt: skip


@needs_gpp
@pytest.mark.parametrize("name", STEPS)
def test_gradients_are_as_exact_as_pytorchs(name, tmp_path):
    assert_gradients_are_as_exact(Taken(tmp_path, "parts", text_of_form(FORMS[name])), name)


# Whose rows go behind another dimension, for products: no stride knows how many they are.
MOVED: dict[str, tuple[str, str, str]] = {
    "places first": (
        "self.l((x * y).tanh().transpose(0, 1)).transpose(0, 1).sigmoid() + x",
        "self.l = nn.Linear(20, 20)", "torch.randn(5, 6, 20), torch.randn(20)",
    ),
    "rows made of a weight": (
        "(torch.softmax(self.l(y.repeat(len(x), 1, 1).transpose(0, 1)).transpose(0, 1), -1) @ x)"
        ".relu()", "self.l = nn.Linear(8, 3)", "torch.randn(5, 3, 8), torch.randn(4, 8)",
    ),
}  # fmt: skip


@needs_gpp
@pytest.mark.parametrize("name", MOVED)
def test_steps_take_any_number_of_rows_that_are_moved(name, tmp_path):
    assert_gradients_are_as_exact(Taken(tmp_path, "parts", text_of_form(MOVED[name])), name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MOVED)
def test_triton_steps_take_any_number_of_rows_that_are_moved(name, tmp_path):
    taken = Taken(tmp_path, "parts", text_of_form(MOVED[name]), "cuda")
    assert_gradients_are_as_exact(taken, name)


@needs_triton
def test_interpreted_gradients_are_as_exact_as_pytorchs(tmp_path):
    forms = {name: FORMS[name] for name in STEPS} | MOVED
    interpreted("test_in_place", "check_triton_steps", str(tmp_path), forms)
