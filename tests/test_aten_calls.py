"""PyTorch's operations as C++: each call is declared by the headers that are said for it."""

from __future__ import annotations

import subprocess

import pytest
from torch.utils import cpp_extension

from tuner.export.aten_calls import header_of, made_by
from tuner.machine.host import find_host_compiler

X, Y, Z = "x", "y", "z"
CALLS = {
    "few headers": [
        ("matmul", [X, Y]),
        ("matmul", [f"-{X}", Y]),
        ("addmm", [X, Y, Z, "1.0", "0.5"]),
        ("permute", [X, "at::IntArrayRef{1, 0}"]),
        ("softmax", [f"{X}.t()", "1", "std::nullopt"]),
        ("linear", [X, Y]),
        ("linear", [X, Y, "std::nullopt"]),
        ("bilinear", [X, Y, Z]),
        ("bilinear", [X, Y, Z, Z]),
    ],
    "all headers": [
        ("where", [X, Y, Z]),
        ("conv2d", [X, Y, "std::nullopt", "at::IntArrayRef{1, 1}"]),
        ("cat", ["at::TensorList{x, y}", "1"]),
    ],
}


def compiled(text):
    """Return what the compiler says of a source, "" where nothing is wrong with it."""
    command = [find_host_compiler(), "-std=c++17", "-fsyntax-only", "-x", "c++", "-"]
    for folder in cpp_extension.include_paths("cpu"):
        command += ["-isystem", folder]
    return subprocess.run(command, input=text, capture_output=True, text=True).stderr


def source_of(headers, statements):
    lines = ["#include <ATen/core/Tensor.h>", *(f"#include <{h}>" for h in headers if h)]
    arguments = ", ".join(f"const at::Tensor& {name}" for name in (X, Y, Z))
    return "\n".join([*lines, f"void all({arguments}, at::Tensor& out) {{", *statements, "}", ""])


@pytest.mark.parametrize("kind", CALLS)
def test_a_call_is_declared_by_its_header(kind):
    headers = {header_of(name, len(words)) for name, words in CALLS[kind]}
    statements = [f"out = {made_by(name, words)};" for name, words in CALLS[kind]]
    assert compiled(source_of(headers, statements)) == ""
    is_short = all(not header or header.endswith("_ops.h") for header in headers)
    assert is_short == (kind == "few headers")


def test_a_call_that_no_header_declares_is_an_error():
    assert "linear" in compiled(source_of([], ["out = at::_ops::linear::call(x, y);"]))
