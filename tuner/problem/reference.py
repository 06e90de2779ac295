"""What to compute: the reference module, its inputs, its float64 oracle.

    load_problem(path, sizes) -> Problem
        make_model(seed)       the reference with its own initial weights, KernelBench's way
        randomise(model, seed) fresh weights and buffers, far from the initial ones
        make_inputs(seed, ...) the reference's inputs, or the same shapes with other values
        oracle(model, inputs)  the answer in float64

The file is code and is trusted like code: it is executed in this process, as a private module.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import itertools
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from tuner.errors import ProblemError, did_you_mean, says_no_memory
from tuner.problem.constructor import Options, other_options
from tuner.problem.draws import (
    Distribution,
    WeightKind,
    draws_all,
    fresh_values,
    redistributed,
    seed_everything,
)
from tuner.problem.given import Given, first_with_rows
from tuner.problem.modes import TuneMode, put_into
from tuner.problem.overrides import Overrides
from tuner.problem.packages import advice_on, text_of
from tuner.problem.returned import tensors_of

if TYPE_CHECKING:
    import torch

__all__ = ["PRIVATE", "ROWS", "Problem", "arguments_of_constructor", "load_problem"]

PRIVATE = "_tuner_reference_"  # begins the name of a reference's module
ROWS = "batch"  # among sizes: the rows (dim 0) of inputs, where a file does not set that name


@dataclass(frozen=True, slots=True)
class Problem:
    """A loaded reference file; `sizes` are its module-level integers, as in force.

    `rows` is how many its inputs have, where that is not left to `get_inputs`.
    """

    path: Path
    text: str
    sha256: str
    sizes: Mapping[str, int]
    module: ModuleType
    mode: TuneMode = "as_given"  # of every model that is made
    rows: int | None = None
    _given: Given = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = Given(self.path, lambda: self._ask("get_inputs"), self._takes, self.rows)
        object.__setattr__(self, "_given", given)

    @property
    def source(self) -> Path:
        """The file whose lines are named: this one, or that of the class which it is made of."""
        return Path(getattr(self.module, "TUNED_FILE", self.path))

    def error(self, reason: str, function: str = "") -> ProblemError:
        """Return, for the caller to raise, the error that this reference cannot be used."""
        code = getattr(getattr(self.module, function, None), "__code__", None)
        line = f":{code.co_firstlineno}" if code and code.co_filename == str(self.path) else ""
        return ProblemError(f"{self.path}{line}: {reason}")

    def num_rows(self) -> int | None:
        """Return the rows (dim 0) of the first input tensor, None where there is none."""
        first = first_with_rows(self._given.forms())
        return None if first is None else int(first.shape[0])

    def with_rows(self) -> tuple[bool, ...]:
        """Return of each input whether its dim 0 is the batch.

        Raises:
            ProblemError: `get_inputs` fails.
        """
        return self._given.with_rows()

    def strided(self) -> list[int]:
        """Return the places of inputs that are not contiguous; those drawn are."""
        return self._given.strided()

    def stand_ins(self, batch: int | None = None) -> list[Any]:
        """Return inputs for where shapes alone matter; large ones cost neither time nor memory.

        `batch` is as for `make_inputs`.
        """
        return self._given.stand_ins(batch)

    def make_model(
        self,
        seed: int,
        device: str | torch.device = "cpu",
        options: Mapping[str, float] | None = None,
        *,
        is_quick: bool = False,
    ) -> torch.nn.Module:
        """Return `Model(*get_init_inputs())` in the problem's mode, seeded as KernelBench does.

        `options` are further arguments of the constructor. With `is_quick` weights are drawn on
        the device, other ones than a user's: where they are replaced at once.

        Raises:
            ProblemError: the reference's constructor or `get_init_inputs` fails.
        """
        import torch

        init_inputs = self.init_inputs(seed)
        seed_everything(seed)
        if is_quick and torch.device(device).type != "cpu":
            try:
                with torch.device(device):
                    return put_into(self._constructed(init_inputs, options).to(device), self.mode)
            except ProblemError as error:
                if says_no_memory(str(error)):
                    raise
                seed_everything(seed)  # it mixes in what lies on the CPU, as numbers of NumPy
        return put_into(self._constructed(init_inputs, options).to(device), self.mode)

    def model_without_memory(self) -> torch.nn.Module:
        """Return the reference on the device "meta", or with its weights where that fails.

        Raises:
            ProblemError: as for `make_model`.
        """
        try:
            return self.make_model(0, "meta", is_quick=True)
        except (ProblemError, NotImplementedError, RuntimeError):
            return self.make_model(0)

    def _constructed(
        self, init_inputs: Sequence[Any], options: Mapping[str, float] | None
    ) -> torch.nn.Module:
        import torch

        with self.explained("Model(*get_init_inputs())"):
            positional, named = arguments_of_constructor(init_inputs, options or {})
            model = self.module.Model(*positional, **named)
            if not isinstance(model, torch.nn.Module):
                raise self.error("Model is not a torch.nn.Module")
            return model

    def options(self, kind: Options) -> dict[str, Any]:
        """Return other values for what the constructor is given or has defaults for."""
        return other_options(self.module.Model, self.init_inputs(0), kind)

    def init_inputs(self, seed: int) -> list[Any]:
        """Return the constructor's arguments; a candidate gets the same ones."""
        seed_everything(seed)
        return self._ask("get_init_inputs")

    def make_inputs(
        self,
        seed: int,
        *,
        distribution: Distribution = "as_given",
        batch: int | None = None,
        device: str | torch.device = "cpu",
    ) -> list[Any]:
        """Return the reference's inputs, or the same shapes with other values.

        `distribution` changes floating-point tensors only. `batch` is the number of rows of every
        tensor that has as many as the first one (fewer are a slice, more are drawn afresh); None
        leaves them as given.

        Raises:
            ProblemError: `get_inputs` fails, or gives no rows to make more of.
        """
        import torch

        if distribution not in get_args(Distribution):
            raise ValueError(f"unknown distribution {distribution!r}")
        shapes = self._given.shapes(batch, device) if draws_all(distribution) else None
        inputs = shapes or self._given.drawn(seed, batch, device)
        generator = torch.Generator(device=device).manual_seed(seed ^ 0x5EED)
        return [redistributed(x, distribution, generator) for x in inputs]

    def randomise(
        self, model: torch.nn.Module, seed: int, kind: WeightKind = "random"
    ) -> torch.nn.Module:
        """Give every floating-point weight and buffer a fresh value, in place.

        Works on the state_dict by name and shape, so a reference and a candidate with the same
        keys get the same values on one kind of device; `fresh_values` says which.
        """
        import torch

        buffers = {name for name, _ in model.named_buffers()}
        generators: dict[torch.device, torch.Generator] = {}
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                where = tensor.device
                if where not in generators:
                    generators[where] = torch.Generator(where).manual_seed(seed)
                tensor.copy_(fresh_values(tensor, name in buffers, generators[where], kind))
        return model

    def call(self, model: torch.nn.Module, inputs: Sequence[Any]) -> tuple[torch.Tensor, ...]:
        """Return the tensors of `result_of`."""
        return tensors_of(self.result_of(model, inputs))

    def result_of(self, model: torch.nn.Module, inputs: Sequence[Any]) -> Any:
        """Run the reference once; return its tensor, or the containers of them, as they are.

        Raises:
            ProblemError: it raised, or returned something else.
        """
        import torch

        with self.explained("Model.forward"):
            result = model(*inputs)
        values = tensors_of(result)
        if not values or not all(isinstance(value, torch.Tensor) for value in values):
            found = ", ".join(type(value).__name__ for value in values) or "nothing"
            raise ProblemError(
                f"{self.path}: Model.forward returned {found}; expected a tensor, or "
                "tensors in tuples, lists, dictionaries or dataclasses"
            )
        if any(value.is_complex() for value in values):
            raise ProblemError(
                f"{self.path}: Model.forward returned complex numbers, which cannot "
                "be judged; expected real ones, e.g. of torch.view_as_real"
            )
        return result

    def _takes(self, inputs: list[Any]) -> bool:
        """Whether forward takes inputs of such shapes, which are on the device "meta"."""
        import torch

        with contextlib.suppress(ProblemError), torch.no_grad():
            self.result_of(self.model_without_memory(), inputs)
            return True
        return False

    def _ask(self, function: str) -> list[Any]:
        with self.explained(f"{function}()"):
            values = getattr(self.module, function)()
        if not isinstance(values, (list, tuple)):
            kind = type(values).__name__
            raise self.error(f"{function}() returned {kind}; expected a list", function)
        return list(values)

    @contextlib.contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn whatever the reference raises inside into a ProblemError with its file and line."""
        with _explained(self.path, what):
            yield


# ---- loading --------------------------------------------------------------------------------


def load_problem(
    path: Path, sizes: Mapping[str, int] | None = None, mode: TuneMode = "as_given"
) -> Problem:
    """Import a KernelBench-format file: `class Model`, `get_inputs`, `get_init_inputs`.

    `sizes` replace module-level numbers of the same name. The file is executed with them in
    force, so what it computes from them (`scale_shape = (out_features,)`) follows. `batch`, where
    the file has no such number, is how many rows inputs have. `mode` is that of the models that
    are made: as the file leaves them, or another one.

    Raises:
        ProblemError: the file cannot be read, parsed or executed, lacks one of the names, or
            `sizes` has a name that the file does not set.
    """
    path = Path(path)
    try:
        raw, text = path.read_bytes(), text_of(path)
    except OSError as error:
        raise ProblemError(f"{path}: cannot read the reference: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ProblemError(f"{path}: not a text file in UTF-8: {error.reason}") from None
    try:
        tree = ast.parse(text, filename=str(path))
    except (SyntaxError, ValueError) as error:
        place = f"{path}:{error.lineno}" if isinstance(error, SyntaxError) else str(path)
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ProblemError(f"{place}: the reference is not valid Python: {reason}") from None
    wanted = dict(sizes or {})
    overrides = Overrides(wanted)
    tree = ast.fix_missing_locations(overrides.visit(tree))
    rows = None if ROWS in overrides.assigned else wanted.pop(ROWS, None)
    module = _execute(path, tree)
    _require_names(path, module)
    known = _sizes_of(module, overrides.assigned)
    _require_known(path, wanted, overrides.assigned, known)
    return Problem(path, text, hashlib.sha256(raw).hexdigest(), known, module, mode, rows)


_module_numbers = itertools.count()


def _execute(path: Path, tree: ast.Module) -> ModuleType:
    # Registered under a private name, since dataclasses and pickling look modules up there.
    name = f"{PRIVATE}{next(_module_numbers)}"
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module
    try:
        with _explained(path, "importing the reference"):
            exec(compile(tree, str(path), "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextlib.contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Turn whatever the user's code raises into a ProblemError with its file and line."""
    try:
        yield
    except ProblemError:
        raise
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((f.lineno for f in reversed(frames) if f.filename == str(path)), None)
        place = f"{path}:{line}" if line is not None else str(path)
        said = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        raise ProblemError(f"{place}: {what} failed: {said}{advice_on(error)}") from error


def _require_names(path: Path, module: ModuleType) -> None:
    its, mine = vars(module), module.__name__
    its.setdefault("get_init_inputs", list)  # a constructor without arguments needs none
    for name, kind in {"Model": "class", "get_inputs": "function"}.items():
        if not callable(its.get(name)):
            own = [n for n, value in its.items() if getattr(value, "__module__", "") == mine]
            raise ProblemError(
                f"{path}: no {kind} {name!r}; expected KernelBench's format: Model, get_inputs, "
                f"get_init_inputs\n  got: {', '.join(own) or 'none'}\n  next: name it {name}"
            )


def _sizes_of(module: ModuleType, assigned: set[str]) -> dict[str, int]:
    return {
        name: value
        for name, value in vars(module).items()
        if name in assigned and type(value) is int
    }


def _require_known(
    path: Path, wanted: Mapping[str, int], assigned: set[str], known: Mapping[str, int]
) -> None:
    for name in wanted:
        if name not in assigned:
            lines = [f"{path}: unknown size {name!r}", f"  known: {', '.join(known) or 'none'}"]
            hint = did_you_mean(name, list(known))
            raise ProblemError("\n".join(lines + ([f"  {hint}"] if hint else [])))


def arguments_of_constructor(
    init_inputs: Sequence[Any], options: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return positional and named arguments, with other values for some; a place is a number."""
    positional = [options.get(str(i), value) for i, value in enumerate(init_inputs)]
    return positional, {name: x for name, x in options.items() if not name.isdigit()}
