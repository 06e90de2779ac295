"""Run KernelBench's own harness and static checker on an exported file.

    git clone https://github.com/ScalingIntelligence/KernelBench
    python -m benchmarks.kernelbench --kernelbench KernelBench --reference REF.py EXPORT.py [...]

Needs an NVIDIA GPU. Prints one line a file: static verdict, correctness at float32's tolerance
(1e-4), mean time of both modules in KernelBench's own timing, and the ratio; exit status 1 when
any file is refused. The harness's imports that evaluation never uses (clients of language-model
services) are replaced by empty modules, so that only PyTorch is needed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType

UNUSED = {
    "openai": ["OpenAI"],
    "litellm": ["completion"],
    "dotenv": ["load_dotenv"],
    "datasets": ["load_dataset"],
    "tomli": [],
    "requests": [],
}


def _without_clients() -> None:
    for name, attributes in UNUSED.items():
        try:
            importlib.import_module(name)
        except ImportError:
            module = ModuleType(name)
            for attribute in attributes:
                setattr(module, attribute, lambda *args, **kwargs: None)
            sys.modules[name] = module


def main() -> int:
    """Parse the command line, run the harness on each file, print a line each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--kernelbench", type=Path, required=True, help="a clone of KernelBench")
    parser.add_argument("--reference", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=5, help="correctness trials")
    parser.add_argument("exports", type=Path, nargs="+")
    options = parser.parse_args()
    _without_clients()
    sys.path.insert(0, str(options.kernelbench / "src"))
    import torch
    from kernelbench.eval import eval_kernel_against_ref
    from kernelbench.kernel_static_checker import validate_kernel_static

    reference = options.reference.read_text()
    is_fine = True
    for export in options.exports:
        text = export.read_text()
        backend = "triton" if "@triton.jit" in text else "cuda"
        is_valid, errors, warnings = validate_kernel_static(
            text, backend=backend, precision="fp32"
        )
        with tempfile.TemporaryDirectory() as build_dir:
            result = eval_kernel_against_ref(
                reference,
                text,
                num_correct_trials=options.trials,
                num_perf_trials=50,
                measure_performance=True,
                backend=backend,
                precision=torch.float32,
                device=torch.device("cuda:0"),
                build_dir=build_dir,
            )
        is_correct = bool(result and result.correctness)
        is_fine = is_fine and is_valid and is_correct
        times = ""
        if result and result.runtime and result.ref_runtime:
            times = (
                f"  {result.runtime:.3f} ms against {result.ref_runtime:.3f} ms"
                f" = {result.ref_runtime / result.runtime:.2f}x"
            )
        print(
            f"{export}: static {'valid' if is_valid else errors}, "
            f"correct {result.metadata.get('correctness_trials') if result else None}{times}"
        )
        if warnings:
            print(f"  static warnings: {'; '.join(warnings)}")
        if not is_correct and result:
            print(f"  {result.metadata}")
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
