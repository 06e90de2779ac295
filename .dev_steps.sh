#!/bin/bash
# Tunes four modules on `cuda` with --effort quick and prints what the verdicts say of a step of training.
# Run from the root of the checkout; TUNE names the command (default .venv/bin/tune, else `tune`).
set -u
TUNE=${TUNE:-$([ -x .venv/bin/tune ] && echo .venv/bin/tune || echo tune)}
FOLDER=${1:-/tmp/steps}
mkdir -p "$FOLDER"
head='import torch
import torch.nn as nn
import torch.nn.functional as F

'
cat > "$FOLDER/rms_norm_gate.py" <<PY
${head}
class Model(nn.Module):
    def __init__(self, features=4096, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x, gate):
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return h * self.weight * F.silu(gate)


def get_inputs():
    return [torch.randn(16384, 4096), torch.randn(16384, 4096)]


def get_init_inputs():
    return []
PY
cat > "$FOLDER/softmax.py" <<PY
${head}
class Model(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1)


def get_inputs():
    return [torch.randn(16384, 4096)]


def get_init_inputs():
    return []
PY
cat > "$FOLDER/norm_linear_gelu.py" <<PY
${head}
class Model(nn.Module):
    def __init__(self, features=1024):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.linear = nn.Linear(features, features)

    def forward(self, x):
        return x + F.gelu(self.linear(self.norm(x)))


def get_inputs():
    return [torch.randn(16384, 1024)]


def get_init_inputs():
    return []
PY
cat > "$FOLDER/cross_entropy.py" <<PY
${head}
class Model(nn.Module):
    def forward(self, logits, labels):
        return F.cross_entropy(logits, labels)


def get_inputs():
    return [torch.randn(4096, 32000), torch.randint(0, 32000, (4096,))]


def get_init_inputs():
    return []
PY
for name in rms_norm_gate softmax norm_linear_gelu cross_entropy; do
    echo "== $name"
    # Outside of the checkout's runs/: everything lands in the folder above.
    "$TUNE" "$FOLDER/$name.py" --effort quick --device cuda --force --runs-dir "$FOLDER/runs" > "$FOLDER/$name.log" 2>&1
    echo "exit status $?"
    grep -E "faster|slower|step of training|steps of training|rejected|its steps" "$FOLDER/$name.log" || tail -n 15 "$FOLDER/$name.log"
done
