"""Run compute-sanitizer over kernels that are generated for modules, and print what it found.

    python -m benchmarks.sanitize_modules [--modules linear_layer_norm gate]
        [--templates nest_wgmma] [--tools memcheck racecheck] [--jobs 13] [--out T.md]

Each module is small, with sizes that no tile divides: one for each kind of main loop, and of what
is reduced behind it. Each of its templates, at its defaults, is exported and called by a child
process under each tool, with two numbers of rows: without gradients, and in a step with gradients
of all inputs and weights. PyTorch's caching allocator is off, so that an access outside a tensor
is outside its allocation; what the file leaves to PyTorch runs under the tool as well. Exit status
1 where any row is not clean. Needs an NVIDIA GPU and compute-sanitizer (of the CUDA toolkit);
`--device cpu` runs the CPU's templates without it, to try the rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.candidates import label
from benchmarks.generated import module_text
from benchmarks.sanitize import Rows, found_by, run_main
from tuner.config.run_config import load_config
from tuner.errors import TunerError
from tuner.export.module import export_text
from tuner.planning.deriving import derive_operator
from tuner.planning.planning import plan
from tuner.trial import Params
from tuner.wording import one_line

# Parts of a module, what forward returns of `x`, and the shape of `x`.
MODULES: Mapping[str, tuple[str, str, tuple[int, ...]]] = {
    "linear_gelu": ("nn.Linear(264, 520)", "F.gelu(self.part(x))", (130, 264)),
    "linear_layer_norm": (
        "nn.Sequential(nn.Linear(264, 520), nn.LayerNorm(520))", "self.part(x)", (130, 264),
    ),
    "linear_logsumexp": ("nn.Linear(264, 520)", "self.part(x).logsumexp(1)", (130, 264)),
    "linear_batch_norm": (
        "nn.Sequential(nn.Linear(264, 520), nn.BatchNorm1d(520))", "self.part(x)", (130, 264),
    ),
    "linear_group_norm": (
        "nn.Sequential(nn.Linear(264, 512), nn.GroupNorm(8, 512))", "self.part(x)", (130, 264),
    ),
    "linear_pooled": (
        "nn.Linear(264, 520)", "F.max_pool1d(self.part(x)[:, None], 4)[:, 0].sum(1)", (130, 264),
    ),
    "linear_of_odd_rows": ("nn.Linear(131, 77)", "self.part(x).relu()", (45, 131)),
    "batched_product": ("nn.Identity()", "torch.bmm(x, x.transpose(1, 2)) * 0.5", (6, 72, 136)),
    "convolution_batch_norm": (
        "nn.Sequential(nn.Conv2d(24, 40, 3), nn.BatchNorm2d(40))", "self.part(x).relu()",
        (6, 24, 19, 23),
    ),
    "convolution_group_norm": (
        "nn.Sequential(nn.Conv3d(8, 24, 3, padding=1), nn.GroupNorm(4, 24))", "self.part(x)",
        (3, 8, 7, 9, 11),
    ),
    "transposed_convolution": (
        "nn.ConvTranspose2d(24, 40, 3, stride=2)", "torch.tanh(self.part(x))", (5, 24, 11, 13),
    ),
    "depthwise_convolution": (
        "nn.Conv2d(12, 12, 3, groups=12, padding=1)", "self.part(x)", (3, 12, 37, 41),
    ),
    "gate": ("nn.RMSNorm(770)", "self.part(x) * F.silu(x)", (37, 770)),
    "softmax_of_long_rows": ("nn.Identity()", "x.softmax(1)", (3, 40_001)),
    "cumulative_sum": ("nn.Identity()", "x.cumsum(1)", (9, 3001)),
    "pooled_images": ("nn.MaxPool2d(3, 2)", "self.part(x).mean((2, 3))", (5, 7, 33, 35)),
}  # fmt: skip
MOST_RMS = 1e-2  # of the largest result's: that is work which was not done, not rounding


@dataclass(frozen=True, slots=True)
class Job:
    """A module's exported file with one template's kernels, unverified and not searched.

    `path` is of what a child is told.
    """

    module: str
    params: Params
    path: Path

    @property
    def name(self) -> str:
        """Of the row in the table."""
        return f"{self.module}/{self.params['template']}"


def jobs_of(name: str, folder: Path, options: argparse.Namespace) -> list[Job] | str:
    """Derive one module's operator, and export each of its templates; or why there is none."""
    part, forward, shape = MODULES[name]
    reference = folder / f"{name}.py"
    text = module_text(f"self.part = {part}", forward, f"{shape}")
    reference.write_text(text)
    try:
        made = derive_operator(reference)
        planned = plan(load_config(made.config, {"device": options.device}))
        toolchain = planned.find_toolchain()
    except TunerError as error:  # as where a device has no kernels of ours for it
        return one_line(str(error))
    found = []
    for params in planned.defaults:
        template = str(params["template"])
        if options.templates and template not in options.templates:
            continue
        candidate = planned.family.render(params, planned.facts)
        flags = toolchain.flags(candidate.language)
        text = export_text(
            planned.family, candidate, reference=reference.read_text(), sizes={}, flags=flags,
            provenance=[],
        )  # fmt: skip
        file = folder / f"{name}-{template}.py"
        file.write_text(text)
        path = file.with_suffix(".json")
        told = {"reference": str(reference), "file": str(file), "device": options.device}
        path.write_text(json.dumps(told))
        found.append(Job(name, params, path))
    return found


def child(job: Path) -> int:
    """Call the file that a job names, without and with gradients, as PyTorch's on the CPU.

    Prints in which calls the file left its work to the reference.
    """
    import torch

    from tuner.evaluate.modules import TookReference, imported, without_reference
    from tuner.evaluate.steps import step_of

    told = json.loads(job.read_text(encoding="utf-8"))

    def rms(x: torch.Tensor) -> float:
        return float(x.detach().double().square().mean().sqrt())

    theirs, mine = (imported(Path(told[which])) for which in ("reference", "file"))
    torch.manual_seed(0)
    own, new = theirs.Model(), mine.ModelNew()
    new.load_state_dict(own.state_dict())
    new.to(told["device"])
    (whole,) = theirs.get_inputs()
    for x, ways in product((whole, whole[: len(whole) // 2 + 1]), ("call", "step")):
        call, expected = (new, own) if ways == "call" else map(step_of, (new, own))
        given = (x,) if ways == "call" else ((x,),)
        with torch.set_grad_enabled(ways == "step"):
            wanted = expected(*given)
            try:
                with without_reference(vars(mine)):
                    sent = x.to(told["device"])
                    found = call(sent) if ways == "call" else call((sent,))
            except TookReference:
                assert ways == "step" or x is not whole, "no kernels are called"
                print(f"PyTorch's own: a {ways} of {len(x)} rows")
                continue
        if isinstance(found, torch.Tensor):
            found, wanted = [found], [wanted]
        size = max(rms(other) for other in wanted)  # a bias before a norm has no gradient
        off = (rms(one.cpu() - other) for one, other in zip(found, wanted, strict=True))
        assert all(each <= MOST_RMS * size for each in off), "wrong"
    return 0


def _sanitized(options: argparse.Namespace) -> Rows:
    def asked(one: tuple[Job, str]) -> tuple[str, str]:
        job, tool = one
        return found_by(tool, "benchmarks.sanitize_modules", job.path, options, {})

    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(options.jobs) as pool,
    ):
        jobs: list[Job] = []
        derived = pool.map(lambda name: jobs_of(name, Path(folder), options), options.modules)
        for name, made in zip(options.modules, derived, strict=True):
            if isinstance(made, str):
                yield name, "", "none", "not run", made
            else:
                jobs += made
        # By itself first: what it compiles is kept, and what fails so says nothing of a tool.
        alone = [*pool.map(asked, ((job, "none") for job in jobs))]
        for job, said in zip(jobs, alone, strict=True):
            if said[0] != "0" or options.tools == ["none"]:
                yield job.name, label(job.params), "none", *said
        fit = [job for job, said in zip(jobs, alone, strict=True) if said[0] == "0"]
        under = [*product(fit, [tool for tool in options.tools if tool != "none"])]
        for (job, tool), said in zip(under, pool.map(asked, under), strict=True):
            yield job.name, label(job.params), tool, *said


def main() -> int:
    """Parse the command line, export, run every tool, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--modules", nargs="*", choices=MODULES, default=list(MODULES))
    return run_main(parser, child, _sanitized)


if __name__ == "__main__":
    sys.exit(main())
