"""Modules inside a worker: a family's own around an operator, and a stranger's from its file."""

from __future__ import annotations

import ast
import base64
import importlib.util
import io
import pickle
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import reduce
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import psutil

from tuner.errors import ProblemError
from tuner.kernel.binding import BoundOp
from tuner.problem.dispatching import dispatched
from tuner.problem.reference import PRIVATE, Problem, arguments_of_constructor

__all__ = [
    "TookReference",
    "arguments_for",
    "constructed",
    "differentiable",
    "free_build_lock",
    "fused",
    "imported",
    "module_of",
    "notes_on",
    "packed",
    "unpacked",
    "without_reference",
]


def module_of(model_new: str, file: str = "model_new.py") -> dict[str, Any]:
    """Execute a family's module text in the namespace that an exported file gives it."""
    import torch

    module = ModuleType("model_new")
    sys.modules["model_new"] = module  # where pickling looks for its classes
    vars(module).update(torch=torch, nn=torch.nn, F=torch.nn.functional)
    exec(compile(model_new, file, "exec"), vars(module))
    return vars(module)


def fused(operator: BoundOp) -> dict[str, Any]:
    """Return what a family's module finds as globals: operator, device, extra operators."""
    extra = {f"fused_{name}": more for name, more in operator.extra.items()}
    return {"fused_op": operator, "fused_device": operator.device, **extra}


def differentiable(operator: Callable[..., Any], module: dict[str, Any]) -> Callable[..., Any]:
    """Give an operator its family's autograd formula, as an exported file registers it."""
    import torch

    def vmap(info: Any, dims: Any, *given: Any) -> tuple[Any, Any]:
        """Call it for one slice after the other, as PyTorch does with a registered operator."""
        made = [
            apply(
                *(x if at is None else x.select(at, i) for x, at in zip(given, dims, strict=True))
            )
            for i in range(info.batch_size)
        ]
        if isinstance(made[0], torch.Tensor):
            return torch.stack(made), 0
        return tuple(map(torch.stack, zip(*made, strict=True))), (0,) * len(made[0])

    parts = {
        "forward": staticmethod(operator),
        "vmap": staticmethod(vmap),
        "setup_context": staticmethod(module["setup_context"]),
        "backward": staticmethod(module["backward"]),
    }
    function: Any = type("Fused", (torch.autograd.Function,), parts)
    apply: Callable[..., Any] = function.apply
    return apply


class TookReference(Exception):
    """Says that a module took the forward of the reference that it is derived from."""


@contextmanager
def without_reference(module: Mapping[str, Any]) -> Iterator[None]:
    """Let a module that is derived from its reference end where it takes that one's forward.

    Which at full size on a CPU took 20 s.
    """
    found = module.get("Model")
    if not (isinstance(found, type) and issubclass(module["ModelNew"], found)):
        yield
        return
    reference: Any = found

    def taken(*_: Any, **__: Any) -> Any:
        raise TookReference

    forward = reference.forward
    reference.forward = taken
    try:
        yield
    finally:
        reference.forward = forward


def notes_on(text: str, sizes: Mapping[str, int]) -> list[str]:
    """Name what a stranger's file does to the sizes of the problem."""
    notes = []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # its import will say more
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        value = node.value if isinstance(node, ast.Assign) else None
        for target in targets:
            name = target.id if isinstance(target, ast.Name) else ""
            if name in sizes and isinstance(value, ast.Constant) and value.value != sizes[name]:
                notes.append(
                    f"it redefines {name} as {value.value!r}; it was asked at {sizes[name]}, "
                    "with inputs that it has no hand in"
                )
    return notes


MOST_DRAWN = 2**16  # random numbers of a tensor whose values say nothing
LOOK_EVERY_S = 0.5  # at a build that somebody else has locked
IDLE_LOOKS = 4  # without a compiler in its folder: whoever locked it is gone


class _FromItsText(SourceFileLoader):
    """Runs what a file says: the bytecode in `__pycache__` beside it may be of another text."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def free_build_lock(path: Path) -> None:
    """Remove the lock on the build of one of our exported files that a killed process left.

    PyTorch's lock is a file without an owner: after `kill -9` in the middle of a compilation every
    later import waits for it, for ever. It is stale where nobody works in its folder.
    """
    name = re.search(r'name="(tuner_[0-9a-f]{8})"', path.read_text(errors="replace"))
    if name is None:
        return
    from torch.utils import cpp_extension

    folder = Path(cpp_extension._get_build_directory(name[1], verbose=False)).resolve()
    num_idle = 0
    while (folder / "lock").exists() and num_idle < IDLE_LOOKS:
        num_idle = 0 if _is_worked_in(folder) else num_idle + 1
        time.sleep(LOOK_EVERY_S)
    if num_idle >= IDLE_LOOKS:
        (folder / "lock").unlink(missing_ok=True)


def _is_worked_in(folder: Path) -> bool:
    """Whether a compiler runs there, or was started by a process that is about to."""
    return any(process.info["cwd"] == str(folder) for process in psutil.process_iter(["cwd"]))


def imported(path: Path) -> ModuleType:
    """Import a stranger's file, from its text alone; what that raises passes through."""
    loader = _FromItsText("stranger", str(path))
    spec = importlib.util.spec_from_file_location("stranger", path, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stranger"] = module
    spec.loader.exec_module(module)
    return module


def constructed(
    kind: Any,
    init_inputs: Sequence[Any],
    device: str,
    options: Mapping[str, float] | None = None,
    *,
    is_quick: bool = False,
) -> Any:
    """Construct a module on the CPU, as a user would, then move it.

    `is_quick`, where its weights are replaced at once: on the device, and on a CPU, which takes
    50 ms for random numbers that it multiplies in 5 ms, most of them are copies of the first.
    """
    import torch

    draws = dispatched(_few_drawn) if is_quick and device == "cpu" else nullcontext()
    with torch.device(device if is_quick else "cpu"), draws:
        positional, named = arguments_of_constructor(init_inputs, options or {})
        return kind(*positional, **named).to(device)


def _few_drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation; of many random numbers in place draw the first, and repeat them."""
    import torch

    many = args[0] if args and isinstance(args[0], torch.Tensor) else None
    if func not in (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default):
        return func(*args, **kwargs)
    if many is None or many.numel() <= MOST_DRAWN or not many.is_contiguous():
        return func(*args, **kwargs)
    flat = many.view(-1)
    func(flat[:MOST_DRAWN], *args[1:], **kwargs)
    for start in range(MOST_DRAWN, flat.numel(), MOST_DRAWN):
        part = flat[start : start + MOST_DRAWN]
        part.copy_(flat[: part.numel()])
    return many


def arguments_for(problem: Problem, module: Mapping[str, Any], file: object) -> list[Any]:
    """Return the arguments of the reference's constructor for a class of `module`."""
    return unpacked(packed(problem), module, str(file))


def packed(problem: Problem) -> str:
    """Return the arguments of the reference's constructor as text, for another process.

    Raises:
        ProblemError: one of them is a tensor or a module, or cannot be pickled.
    """
    import torch

    class Packer(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, torch.Tensor | torch.nn.Module):
                raise pickle.PicklingError(f"it holds a {type(value).__name__}")
            return NotImplemented

    into = io.BytesIO()
    arguments = problem.init_inputs(0)
    try:
        Packer(into).dump(arguments)
    except Exception as error:  # of PyTorch's or a user's own
        raise problem.error(
            f"another process cannot be given what get_init_inputs() returns: {error}\n"
            f"  got: [{', '.join(type(value).__name__ for value in arguments)}]\n"
            "  expected: numbers, words, lists, dicts, and objects of classes that stand at the "
            "top of a file\n"
            "  next: make tensors, modules and functions in Model.__init__",
            "get_init_inputs",
        ) from error  # fmt: skip
    return base64.b64encode(into.getvalue()).decode()


def unpacked(text: str, module: Mapping[str, Any], file: str) -> list[Any]:
    """Return the arguments that were packed, for a class of `module`, the names of `file`.

    What the reference's file defines, such as the class of a config, is what `module` calls so.

    Raises:
        ProblemError: it has no such class or function, or makes nothing of them.
    """

    class Unpacker(pickle.Unpickler):
        def find_class(self, where: str, name: str) -> Any:
            if not where.startswith(PRIVATE):
                return super().find_class(where, name)
            first, *others = name.split(".")
            try:
                return reduce(getattr, others, module[first])
            except (KeyError, AttributeError):
                raise ProblemError(
                    f"{file}: no {name}, of which get_init_inputs() makes an argument of the "
                    "constructor\n  next: define or import it there as the reference's file does"
                ) from None

    try:
        found: list[Any] = Unpacker(io.BytesIO(base64.b64decode(text))).load()
    except ProblemError:
        raise
    except Exception as error:  # its class is made in another way than the reference's
        said = f"{type(error).__name__}: {error}"
        raise ProblemError(
            f"{file}: cannot make what get_init_inputs() returns: {said}\n"
            "  next: define the classes of its arguments as the reference's file does"
        ) from error
    return found
