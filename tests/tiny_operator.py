"""A made-up operator for tests, y = x + x, whose parameter `mode` picks how a candidate behaves.

`write_family` makes its folder; `config_text` a config that finds it. `salt` stands in a comment
alone, so that candidates of other salts have the same machine code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "doubled_values"
GOOD = ("ok", "slow", "prints", "leaks")  # modes that are right
BAD = {  # mode: status and a part of the reason
    "broken": ("compile", "this_is_not_declared"),
    "segfault": ("runtime", "SIGSEGV"),
    "exit": ("runtime", "exited with status 0"),
    "raise": ("runtime", "it does not like this shape"),
    "hang": ("timeout", "no answer within"),
    "wrong": ("correctness", "as given"),
}

OP = """
name: doubled_values
title: Doubled values
function: fused_doubled_values
replaces: [addition]
sizes: {rows: 64, cols: 100}
arguments:
  - {name: x, shape: [rows, cols]}
outputs:
  - {name: y, shape: [rows, cols]}
flops: rows * cols
bytes: 8 * rows * cols
"""

# So many operations that a kernel of one sweep is faster on any machine.
REFERENCE = '''
"""Doubled values."""
import torch
import torch.nn as nn

rows = 64
cols = 100


class Model(nn.Module):
    def forward(self, x):
        for _ in range(200):
            x = x + 0.0
        return (x * 4.0 / 2.0).contiguous()


def get_inputs():
    return [torch.randn(rows, cols)]


def get_init_inputs():
    return []
'''

MODEL_NEW = """
class ModelNew(nn.Module):
    def forward(self, x):
        if x.dtype != torch.float32 or x.dim() != 2:
            return ((x + 0.0) * 4.0 / 2.0).contiguous()
        return fused_op(x)[0]


def setup_context(ctx, inputs, output):
    return None


def backward(ctx, grad):
    return grad * 2.0
"""

TEMPLATE = """---
title: One sweep, or an accident
language: cpp
requires:
  - {expr: "device.kind == 'cpu'", why: "it is C++ for the CPU"}
parameters:
  mode: {about: "how it behaves", default: ok}
  salt: {about: "stands in a comment", default: 0}
  step: {about: "elements an iteration", default: 1}
steps:
  - {call: fused_doubled_values_sweep, args: [x, y, rows, cols]}
optimisations:
  - {text: "one sweep over memory"}
---
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <unistd.h>
// salt {{ salt }}
extern "C" const char* fused_doubled_values_sweep(const float* x, float* y, int64_t rows,
                                                  int64_t cols) {
  const int64_t n = rows * cols;
{% if mode == "broken" %}
  this_is_not_declared(n);
{% elif mode == "segfault" %}
  *reinterpret_cast<volatile int*>(8) = 1;
{% elif mode == "exit" %}
  _exit(0);
{% elif mode == "hang" %}
  for (;;) usleep(1000);
{% elif mode == "raise" %}
  return "it does not like this shape";
{% elif mode == "prints" %}
  std::printf("printed by a candidate\\n");
  std::fprintf(stderr, "printed by a candidate, too\\n");
  std::fflush(stdout);
  usleep(2000);  // never the fastest: what is exported must not print
{% elif mode == "leaks" %}
  volatile char* leaked = static_cast<char*>(std::malloc(4096));
  leaked[0] = 1;
{% elif mode == "slow" %}
  for (volatile int64_t i = 0; i < 20 * n; i = i + 1) {}
{% endif %}
  int64_t i = 0;
  for (; i + {{ step }} <= n; i += {{ step }})
    for (int64_t j = 0; j < {{ step }}; ++j) y[i + j] = x[i + j] + x[i + j];
  for (; i < n; ++i) y[i] = x[i] + x[i];
{% if mode == "wrong" %}
  y[n / 2] += 1.0f;
{% endif %}
  return nullptr;
}
"""


def write_family(folder: Path, template: str = TEMPLATE, name: str = "sweep.cpp.j2") -> Path:
    """Write the operator into `folder` (for `problem.templates`); return `folder`."""
    family = folder / NAME
    family.mkdir(parents=True, exist_ok=True)
    for file, text in {
        "op.yaml": OP,
        "reference.py": REFERENCE,
        "model_new.py": MODEL_NEW,
        name: template,
    }.items():
        (family / file).write_text(text, encoding="utf-8")
    return folder


def config_text(
    folder: Path,
    *,
    problem: Mapping[str, Any] | None = None,
    space: Mapping[str, Sequence[Any]] | None = None,
    constraints: Sequence[Mapping[str, str]] = (),
    search: Mapping[str, Any] | None = None,
    measure: Mapping[str, Any] | None = None,
    **others: Any,
) -> str:
    """Return a config of the operator in `folder`, small and short; JSON is YAML."""
    return json.dumps(
        {
            "problem": {
                "op": NAME,
                "templates": [str(folder)],
                "steps": "pytorch",
                **(problem or {}),
            },
            "device": "cpu",
            "space": {"mode": ["ok"]} if space is None else dict(space),
            "constraints": list(constraints),
            "search": {"sampler": "grid", "trials": 20, "seed": 1, **(search or {})},
            "measure": {
                "screen": "5ms",
                "finalists": "20ms",
                "num_finalists": 1,
                "num_processes": 2,
                **(measure or {}),
            },
            **others,
        },
        indent=1,
    )
