"""What is done to a module between its calls: modes, weights, copies; the reference's alike.

A question has two sets of weights, `state.*` and `other.*`. The module holds the first; each of
the actions of `GIVEN` and "borrow" gives it the one that it lacks, or a part of it.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tuner.check.calls import parts
from tuner.check.calls.belongings import copied_inside, lost, not_its_own, put_on
from tuner.check.calls.crossing import Action, Dtype, Mode, Script
from tuner.check.calls.exercise import arguments_of, asked_through, tensors_under
from tuner.check.calls.handover import GIVEN, edit, edit_all, empty, replace, said_of_loads
from tuner.check.calls.layouts import fitted, laid_out
from tuner.check.calls.registries import read_elsewhere
from tuner.check.calls.surroundings import left_by_a_refusal
from tuner.check.calls.touches import TOUCHES, Touches

if TYPE_CHECKING:
    import torch

__all__ = ["BEFORE_CALL", "History", "is_unread", "set_mode"]


MOST_MADE = 4  # modules of which one may lie where an earlier one lay
BEFORE_CALL = "what comes before call"  # the stage in which an action is refused


def set_mode(model: torch.nn.Module, mode: Mode) -> None:
    """Put a model into the mode that a probe asks for."""
    model.train(mode not in ("eval", "thawed"))
    if mode in ("frozen", "thawed"):
        for child in model.children():
            child.train(mode == "thawed")
    if mode == "cumulative":
        for module in model.modules():
            if hasattr(module, "momentum"):
                module.momentum = None


def _converted(model: torch.nn.Module, dtype: Dtype) -> torch.nn.Module:
    """Convert a model as a user would: `half()`, `bfloat16()`, `double()`."""
    method = {"float64": "double", "float16": "half", "bfloat16": "bfloat16"}[dtype]
    result: torch.nn.Module = getattr(model, method)()
    return result


def is_unread(name: str, script: Script) -> bool:
    """Whether a question has a tensor as a weight that a module has already, or is never given."""
    acts = {action for actions in script.before for action in actions}
    is_read = script.mapped or not acts <= {"train", "eval"}
    return name.startswith(("state.", "other.")) and not is_read


class History:
    """A module in the course of a script.

    `model` is what is called; "copy" and "pickle" replace it. `make_another` is what "another"
    does, `make_others` what "others made" does, and `make_new` makes what replaces it in "made
    anew". `tables` are of the module's file, as they were before it. `refusals` are the actions
    that it refused aloud, which then went undone. `changes` are what a copy shares with the
    original, or has lost; `loads` what loading a wrong state_dict led to.
    With `is_exact` it is the oracle, which stays in float64 when it is converted, but for what the
    weights lose.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        script: Script,
        tensors: Mapping[str, torch.Tensor],
        is_exact: bool = False,
    ) -> None:
        self.model = model
        self.make_another: Callable[[], None] = lambda: None
        self.make_others: Callable[[], Any] = lambda: None
        self.make_new: Callable[[], torch.nn.Module] | None = None
        self._arguments: Callable[[], list[Any]] = lambda: arguments_of(script, tensors, 0)
        self.tables: list[tuple[Any, list[Any]]] = []
        self.refusals: list[str] = []
        self.changes: list[str] = []
        self.loads: list[str] = []
        self._tensors = tensors
        self._is_marked = False  # with hooks and attributes of a user
        self._script = script
        self._is_exact = is_exact
        self._weights = tensors_under("state", tensors), tensors_under("other", tensors)
        self._held = 0  # which of them the module holds
        self._trained = [name for name, p in model.named_parameters() if p.requires_grad]
        self._twin: Any = None
        self._places: set[tuple[str, int]] = set()  # of modules that are no more
        self._met: set[str] = set()
        self._touches = Touches(self._arguments)
        self._num_placed = 0  # parameters that were taken one by one
        self._lent: dict[str, torch.Tensor] | None = None

    def prepare(self, call: int) -> Callable[..., Any]:
        """Do what comes before that call; return what is called."""
        self._lent = None
        for action in self._script.before[call] if call < len(self._script.before) else ():
            self._act(action)
        import torch

        model = asked_through(self.model, self._script, call)
        lent = self._lent
        if lent is None:
            return model
        return lambda *arguments: torch.func.functional_call(self.model, lent, arguments)

    def serve_mild(self, call: Callable[[Any, list[Any]], Any]) -> None:
        """Let the module serve usual inputs, in each mode that the script names, before all else.

        A decision that it takes on these inputs must not hold for others.
        """
        script = self._script
        for mode in script.mild:
            set_mode(self.model, mode)
            numbers = {int(n[2:]): x for n, x in script.numbers.items() if n.startswith("0.")}
            values = [
                numbers[i] if i in numbers else laid_out(self._tensors[f"mild.{i}"], "contiguous")
                for i in range(script.num_inputs)
            ]
            call(self.model, values)
        if script.mild:
            set_mode(self.model, script.mode)

    @property
    def is_lent(self) -> bool:
        """Whether the next call is made with weights that are lent to the module."""
        return self._lent is not None

    def _act(self, action: Action) -> None:
        import torch

        plain: dict[str, Callable[[], object]] = {
            "copy": lambda: self._go_on_with("deep copy", copy.deepcopy),
            "pickle": lambda: self._go_on_with("pickled copy", _pickled),
            "read elsewhere": lambda: self._go_on_with(
                "saved copy", lambda model: read_elsewhere(model, self.tables)
            ),
            "copy inside": lambda: self._go_on_with(
                "copy in a container", lambda m: copied_inside(m, self.changes)
            ),
            "replace module": self._replace_module,
            "another": self.make_another,
            "infer": self._infer,
            "wrap module": lambda: parts.wrap(self.model, self._next),
            "parametrize": lambda: parts.parametrize(self.model, self._next),
            "tie": lambda: parts.tie(self.model, self._next),
            "derive": lambda: parts.derive(self.model),
            "resize": lambda: parts.resize(self.model, self._next(self._script.paths)),
            "made anew": self._make_anew,
            "empty": lambda: empty(self.model, self._weights[1]),
        }
        if action in plain:
            plain[action]()
        elif action in ("train", "eval"):
            given = getattr(self.model, action)()
            if given is not self.model:  # `model = model.eval()` is usual
                self.changes.append(f"{action}() returns {type(given).__name__}, not the module")
        elif action.startswith("freeze") or action == "thaw":
            self._freeze(action)
        elif action == "refused call":
            self.changes += left_by_a_refusal(self.model, fitted(self._arguments(), "too_wide"))
        elif action in TOUCHES:
            place = self._script.first_place + self._num_placed
            self._touches.act(action, self.model, self._next, place)
        elif action == "read state":
            self.changes += not_its_own(self.model)
        elif action == "restore":
            self.model = self.model.double() if self._is_exact else self.model.float()
            GIVEN["load"](self.model, self._weights[self._held])
        elif action.startswith("set "):
            _, mode, *whose = action.split()
            parts.set_training(self.model, self._next, "".join(whose), mode == "train")
        elif action == "others made":
            with contextlib.suppress(Exception):  # a kernel may be of one size, and say so
                self.make_others()
        elif action == "twin":
            self._twin = parts.copied(self.model)
        elif action == "swap":
            self.model, self._twin = self._twin, self.model
        elif action == "hook":
            put_on(self.model)
            self._is_marked = True
        elif action == "load wrong":
            self.loads += said_of_loads(self.model)
        elif action in ("convert", "convert inside", "convert part"):
            if action == "convert inside":
                _converted(torch.nn.Sequential(self.model), self._script.dtype)
            else:
                self.model = _converted(self.model, self._script.dtype)
            if action == "convert part":
                parts.keep_norms(self.model)
            if self._is_exact:
                self.model = self.model.double()
        elif action in ("borrow", "borrow one"):
            parameters = dict(self.model.named_parameters())
            names = parameters if action == "borrow" else [self._next(list(parameters))]
            other = self._weights[1 - self._held]
            self._lent = {n: _like(other[n], parameters[n]) for n in names if n in other}
        elif action == "edit one":
            other = self._weights[1 - self._held]
            named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
            name = self._next(
                [n for n, t in named.items() if n in other and t.is_floating_point()]
            )
            edit_all(self.model, {name: other[name]} if name else {})
        elif action == "replace one":
            other = self._weights[1 - self._held]
            name = self._next([n for n, _ in self.model.named_parameters() if n in other])
            replace(self.model, {name: other[name]} if name else {})
        else:
            self._held = 1 - self._held
            GIVEN[action](self.model, self._weights[self._held])

    def _next(self, names: Sequence[str]) -> str:
        """Return the name at the next place; "" where there is none."""
        at = self._script.first_place + self._num_placed
        self._num_placed += 1
        return names[at % len(names)] if names else ""

    def _go_on_with(self, what: str, made: Callable[[Any], Any]) -> None:
        import torch

        original = self.model.state_dict()
        try:  # the oracle's numbers are the same however it was copied
            self.model = (copy.deepcopy if self._is_exact else made)(self.model)
        except Exception as error:  # a module with a lock or a library may
            self.refusals.append(f"a {what} is refused: {type(error).__name__}: {error}")
            return
        self.changes += lost(self.model, what) if self._is_marked else []
        for name, tensor in self.model.state_dict().items():
            if name in original and original[name].data_ptr() == tensor.data_ptr() != 0:
                self.changes.append(f"a {what} shares the memory of {name} with the original")
        torch.nn.Module._apply(self.model, torch.clone)  # as `to` moves them

    def _make_anew(self) -> None:
        """Forget the module, and go on with a new one: a graph may live longer than its module."""
        if self.make_new is None:
            self.model = parts.copied(self.model)
            return
        held = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        values = {name: (t.detach().clone(), t.requires_grad) for name, t in held.items()}
        modes = {name: part.training for name, part in self.model.named_modules()}
        held.clear()
        tied = parts.tied_as(self.model)
        self._places |= _places_of(self.model)
        last = weakref.ref(self.model)
        del self.model
        if last() is not None:  # so that another may lie where it lay
            gc.collect()
        made: list[Any] = []  # until the end, so that the next lies elsewhere
        again: set[str] = set()  # parts that lie where they lay in an earlier module
        while len(made) < MOST_MADE and not again - self._met:
            made.append(self.make_new())
            again = {name for name, _ in self._places & _places_of(made[-1])}
        self._met |= again
        self.model = made[-1]
        for name, part in self.model.named_modules():
            part.training = modes.get(name, part.training)
        parts.tie_as(self.model, tied)
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if name in values:
                value, wants_gradient = values[name]
                tensor.data.copy_(value)
                tensor.requires_grad_(wants_gradient)

    def _infer(self) -> None:
        """Serve in inference mode, whose tensors autograd takes for no later call."""
        import torch

        modes = [(part, part.training) for part in self.model.modules()]  # "frozen" has two
        model = self.model.eval()
        with contextlib.suppress(Exception), torch.inference_mode():
            model(*(laid_out(value, "contiguous") for value in self._arguments()))
        for part, is_training in modes:
            part.training = is_training

    def _freeze(self, action: Action) -> None:
        if action in ("freeze whole", "freeze inside"):  # by methods, which a class may override
            names = {n.partition(".")[0] for n in self._trained if "." in n}
            inside = [n for n, _ in self.model.named_children() if n in names]
            at = self._next(inside) if action == "freeze inside" else ""
            self.model.get_submodule(at).requires_grad_(False)
            return
        frozen = {"freeze": [], "thaw": [], "freeze all": self._trained}.get(action, [])
        if action == "freeze":
            frozen = [self._next(self._trained)]
        if action == "freeze module":
            owners = dict.fromkeys(name.rpartition(".")[0] for name in self._trained)
            owner = self._next(list(owners))
            frozen = [name for name in self._trained if name.rpartition(".")[0] == owner]
        for name, parameter in self.model.named_parameters():
            if name in self._trained:
                parameter.requires_grad_(name not in frozen)

    def _replace_module(self) -> None:
        """Put a copy in the place of the next submodule, with the other weights."""
        name = self._next([n for n, _ in self.model.named_children()])
        if not name:
            return
        child = parts.copied(getattr(self.model, name))
        other = self._weights[1 - self._held]
        own = {n[len(name) + 1 :]: t for n, t in other.items() if n.startswith(f"{name}.")}
        edit(child, own)
        setattr(self.model, name, child)


def _places_of(model: torch.nn.Module) -> set[tuple[str, int]]:
    """Return where a module's parts lie in memory, by name."""
    return {(name, id(part)) for name, part in model.named_modules() if name or not part._modules}


def _pickled(model: Any) -> Any:
    memory = io.BytesIO()
    pickler = _Pickler(memory)
    pickler.dump(model)
    memory.seek(0)
    reader = pickle.Unpickler(memory)
    reader.persistent_load = pickler.copies.__getitem__  # type: ignore[method-assign]
    return reader.load()


class _Pickler(pickle.Pickler):
    """Pickles, but copies a GPU's storages there; through the host 268 MB take 0.2 s."""

    def __init__(self, memory: io.BytesIO) -> None:
        super().__init__(memory)
        self.copies: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        import torch

        if not isinstance(value, torch.storage.TypedStorage):
            return None
        storage, dtype = value._untyped_storage, value.dtype  # the public names warn
        if storage.device.type == "cpu":
            return None
        copied = torch.storage.TypedStorage(
            wrap_storage=storage.clone(), dtype=dtype, _internal=True
        )
        self.copies.append(copied)
        return len(self.copies) - 1


def _like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return tensor.to(parameter.dtype).requires_grad_(parameter.requires_grad)
