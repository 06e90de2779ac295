"""The kinds of device that candidates run on: one record each of all in which they differ.

On a CPU a call is done when it returns. On a GPU it is launched on a stream while the host goes
on: its functions get the stream, and whoever wants to know that it is done waits. Everything else
asks the record. What a further kind needs besides: a description (`device`) and a timer
(`evaluate.timers`).
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from tuner.trial import Language

if TYPE_CHECKING:
    import torch

__all__ = [
    "FILE_ENDINGS",
    "PLATFORMS",
    "SOURCE_NAMES",
    "VISIBLE",
    "Kind",
    "Platform",
    "is_gpu",
    "platform_of",
    "see_first_gpu",
    "visible_as",
]

Kind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Platform:
    """One kind of device.

    Attributes:
        kind: in configs and records.
        torch_type: in `torch.device`.
        language: of the texts that its compiler takes, as a template's head has it.
        ending: of the files of such templates.
        source_name: of such a text in the folder of a build.
        is_gpu: calls are launched on a stream, whose pointer the functions get last.
        dispatch_key: under which PyTorch finds its operators.
        needs: what an exported file needs to compile, in words.
    """

    kind: Kind
    torch_type: Literal["cpu", "cuda"]
    language: Language
    ending: str
    source_name: str
    is_gpu: bool
    dispatch_key: str
    needs: str

    def chosen(self, device: torch.device | str) -> AbstractContextManager[Any]:
        """Return a context in which launches go to this device.

        A builder's stand-ins, which have no memory, and an interpreter's tensors are on none.
        """
        import torch

        if not self.is_gpu or torch.device(device).type != self.torch_type:
            return nullcontext()
        found: AbstractContextManager[Any] = torch.cuda.device(device)
        return found

    def stream(self) -> int:
        """Return the pointer of the current stream of the device that launches go to."""
        import torch

        return int(torch.cuda.current_stream().cuda_stream)

    def synchronize(self, device: torch.device | str | None = None) -> None:
        """Wait until all that was launched is done; a RuntimeError where some of it failed."""
        if self.is_gpu:
            import torch

            torch.cuda.synchronize(device)

    def free_bytes(self, device: torch.device | str) -> int | None:
        """Return how much of the device's own memory nobody uses; None where it has none."""
        if not self.is_gpu:
            return None
        import torch

        return int(torch.cuda.mem_get_info(device)[0])


_CPU = Platform(
    kind="cpu", torch_type="cpu", language="cpp", ending=".cpp.j2", source_name="source.cpp",
    is_gpu=False, dispatch_key="CPU",
    needs="a C++ compiler with OpenMP and ninja (compiled at the first import)",
)  # fmt: skip
_CUDA = Platform(
    kind="cuda", torch_type="cuda", language="cuda", ending=".cu.j2", source_name="source.cu",
    is_gpu=True, dispatch_key="CUDA",
    needs="nvcc, a C++ compiler and ninja (compiled at the first import)",
)  # fmt: skip
VISIBLE = "CUDA_VISIBLE_DEVICES"
GPU_FILES = "/dev/nvidia[0-9]*"  # of each of NVIDIA's
PLATFORMS: Mapping[Kind, Platform] = MappingProxyType({"cpu": _CPU, "cuda": _CUDA})
_BY_LANGUAGE: dict[Language, Platform] = {one.language: one for one in PLATFORMS.values()}

FILE_ENDINGS: dict[Language, str] = {"triton": ".triton.py.j2"}
FILE_ENDINGS |= {language: one.ending for language, one in _BY_LANGUAGE.items()}
SOURCE_NAMES: dict[Language, str] = {"triton": "source.py"}
SOURCE_NAMES |= {language: one.source_name for language, one in _BY_LANGUAGE.items()}


def platform_of(what: torch.device | str) -> Platform:
    """Return the platform of a device, as PyTorch names it, or of a language.

    Triton's is that of NVIDIA's GPUs, for which it is built here.
    """
    name = str(what).partition(":")[0]
    if name == "triton":
        return _CUDA
    return _BY_LANGUAGE[name] if name in _BY_LANGUAGE else PLATFORMS[name]  # type: ignore[index]


def is_gpu(device: torch.device | str) -> bool:
    """Whether a device works beside the host, on streams."""
    return platform_of(device).is_gpu


def visible_as(names: Sequence[str], env: Mapping[str, str]) -> str:
    """Return what `CUDA_VISIBLE_DEVICES` is of a process that shall see these GPUs alone.

    A process opens each GPU that it sees, and the driver lets one process of a host do so at a
    time: with eight of them each opening takes eight times as long, for all.

    Args:
        names: `cuda:0`, as this process numbers them; there they are `cuda:0` and so on.
        env: of this process.
    """
    mine = [each.strip() for each in env.get(VISIBLE, "").split(",") if each.strip()]
    numbers = [int(name.partition(":")[2] or 0) for name in names]
    return ",".join(mine[n] if n < len(mine) else str(n) for n in numbers)


def see_first_gpu() -> None:
    """Let processes that are started from now on see the first GPU of several alone.

    It keeps its name. To start CUDA takes five times as long where it sees four GPUs. Who has
    hidden all of them, by an empty list, keeps them hidden.
    """
    is_hidden = not os.environ.get(VISIBLE, "0").strip()
    if len(glob.glob(GPU_FILES)) > 1 and not is_hidden:
        os.environ[VISIBLE] = visible_as(["cuda:0"], os.environ)
