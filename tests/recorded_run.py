"""A real run, kept whole: KernelBench level 2, problem 39, in the TF32 class, on an H200.

The archive holds what `tune` wrote, but for the page, the T4 file and Optuna's journal, which
are made of the rest. Only paths and the kernel's build name were shortened.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from tuner.run import Run, open_run

_ARCHIVE = Path(__file__).parent / "runs" / "h200_tf32.tar.xz"


def h200_run(folder: Path) -> Run:
    """Unpack the run into a folder of runs."""
    with tarfile.open(_ARCHIVE) as archive:
        # Python before 3.11.4 has no filters; later ones warn where none is chosen.
        archive.extractall(
            folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {})
        )
    (path,) = folder.glob("*-gemm_scale_batchnorm-nvidia-h200")
    return open_run(path)
