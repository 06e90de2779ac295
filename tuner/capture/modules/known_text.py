"""Calls of a module's text that are like one before: what spares the host most of its questions.

`usual_state` asks all of a call, which takes the host longer than PyTorch's operations at small
sizes. What it took is remembered here with guards, which are asked instead.
"""

from __future__ import annotations

__all__ = ["KNOWN_TEXT", "WATCHED_TEXT"]

# Whether PyTorch has to see the operations of a call, but for modes of its functions: the lines of
# a condition.
WATCHED_TEXT = """\
        torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch.autograd._profiler_enabled()
"""

# The text expects that of `usual_state` before it. What it keeps has no strong references to
# tensors or parts of the module: who drops them frees their memory, as without this file.
KNOWN_TEXT = """\
try:  # what torch.compile asks before each call; of versions with which it was tried
    from torch._C._dynamo.guards import TensorGuards
except ImportError:
    TensorGuards = None
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
_KNOWS_CALLS = TensorGuards is not None and (2, 9) <= _VERSION < (2, 14)
_KNOWN = {}  # by the id of a module that lives, and its mode: its calls that `usual_state` took
_MOST_CHANGES = 64  # of a module, after which no more of its calls are remembered
_TENSORS = (torch.Tensor, nn.Parameter)
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size)
_LEAVES = {*_CONSTANTS, complex, bytes, types.CodeType}
_OPAQUE = ("torch", "logging", "threading", "_thread", "io", "_io", "weakref", "numpy", "builtins")


class KnownCall:
    # A call that kernels take: what its tensors have to be, and what one like it launched.
    def __init__(self, guards, is_step):
        self.guards, self.is_step, self.replays = guards, is_step, {}
        self.gradients = {}  # by operator: calls of these behind it; None of what is not known

    def __call__(self, op, *args):
        # An operator, without its checks and without PyTorch's dispatcher.
        replay = self.replays.get(op)
        if replay is None:
            return self.at_first(op, args)
        pointers = [x.data_ptr() for x in args]
        if any([pointer % 16 for pointer in pointers]):
            return self.at_first(op, args)
        made = replay.again(pointers, args)
        return made if isinstance(made, tuple) else (made,)

    def at_first(self, op, args):
        # And remembers what is launched where the arguments lie as they do in each such call.
        work = getattr(op, "work", None)
        if work is None:
            return detached(op, *args)
        given = [x.contiguous() for x in args]  # sooner than by op
        pointers = [x.data_ptr() for x in given]
        if any([x.is_neg() for x in given]) or any([pointer % 16 for pointer in pointers]):
            return detached(op, *args)
        again = getattr(work, "again", None)  # what an earlier call of this form launched
        if again is None:
            made = work(*given)
        else:
            form = (work, *[x for y in given for x in (y.shape, y.dtype, y.get_device())])
            made = again(form, pointers, given)
            if all(map(is_, args, given)):
                self.replays[op] = work.replays.get(form)
        return made if isinstance(made, tuple) else (made,)


def known_gradients(run, op, *args):
    # An operator of gradients, where the step's forward was a call that is known.
    if type(run) is not KnownCall or is_watched():
        return op(*args)
    known = run.gradients.get(op, run)
    if known is run:
        guards = guards_of(args)
        known = run.gradients[op] = None if guards is None else KnownCall(guards, is_step=False)
    if known is None or not known.guards.check(*args):
        return op(*args)
    return known(op, *args)


class Known:
    # A module as `usual_state` found it, and the calls of it that it took.
    def __init__(self, module, parts, edited, state, changes):
        key = id(module), module.training
        self.module = weakref.ref(module, lambda _: _KNOWN.pop(key, None))
        self.parts = parts
        self.edited = edited
        self.names = [*state]
        self.places = places_of(module, parts, [*state.values()])
        self.changes = changes
        self.calls = {}  # by grad mode and the inputs' shapes

    def tensors_of(self, module):
        # The module's tensors, of which guards know what they have to be; None where parts or
        # attributes are not as before. Tensors may be others: to refer to one weakly would keep
        # `torch.utils.swap_tensors` from working.
        tables = []
        for part, kind, count, names, values, keys, held_by in self.parts:
            is_part = part is not None
            part = part() if is_part else module
            if type(part) is not kind:
                return None
            held = part.__dict__
            if len(held) != count or not all(map(is_, map(held.get, names), values)):
                return None
            if is_part and (
                held["_forward_hooks"]
                or held["_forward_pre_hooks"]
                or held["_backward_hooks"]
                or held["_backward_pre_hooks"]
            ):
                return None
            own, buffers, parts = held["_parameters"], held["_buffers"], held["_modules"]
            if [*own, *buffers, *parts] != keys:
                return None
            if not all(map(is_, parts.values(), [reference() for reference in held_by])):
                return None
            tables += own, buffers
        for part, name, before in self.edited:
            now = []
            is_flat = is_flattened((module if part is None else part()).__dict__.get(name), now)
            if not is_flat or len(now) != len(before) or not all(map(is_, now, before)):
                return None
        if self.places is None or not self.parts:
            return None
        places, tied, absent = self.places
        if any([tables[i][key] is not tables[j][same] for i, key, j, same in tied]):
            return None
        if any([tables[i][key] is not None for i, key in absent]):
            return None
        return [tables[i][key] for i, key in places]

    def forget(self):
        # Of a module that was edited it keeps how often it was.
        self.parts = self.edited = ()
        self.calls.clear()


def is_constant(value):
    # Whether an attribute is what it was if it is the same object, and holds no module.
    if isinstance(value, tuple):
        return all(map(is_constant, value))
    if isinstance(value, types.FunctionType):
        is_plain = value.__closure__ is None and "<lambda>" not in value.__qualname__
        return is_plain and all(map(is_constant, value.__defaults__ or ()))
    return isinstance(value, _CONSTANTS) or type(value) is types.BuiltinFunctionType


def is_flattened(value, into, depth=5):
    # Adds to `into` what an attribute holds that can be edited: constants and classes, which are
    # the same objects as long as nothing was edited, and nothing that may hold the module.
    # Whether that is all of what `setting_of` looks at.
    kind = type(value)
    if kind in _LEAVES:
        into.append(value)
        return True
    if isinstance(value, type) or hasattr(kind, "__members__"):  # of an enumeration
        into.append(value)
        return "<locals>" not in (value if isinstance(value, type) else kind).__qualname__
    if is_constant(value):
        into.append(value)
        return True
    if not depth or len(into) > 200:
        return False
    if kind is dict:
        items = [*value, *value.values()]
    elif kind in (list, tuple, set, frozenset):
        items = [*value]
    elif kind is types.FunctionType:
        try:
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
        except ValueError:  # nothing yet
            return False
        items = [value.__code__, value.__defaults__, *cells]
    elif "<locals>" in kind.__qualname__ or kind.__module__.partition(".")[0] in _OPAQUE:
        return False
    else:
        held = getattr(value, "__dict__", {})
        items = [*held, *held.values(), *[getattr(value, name, None) for name in slots_of(kind)]]
        if isinstance(value, dict):
            items += [*value, *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset)):
            items += [*value]
        elif isinstance(value, functools.partial):
            items += [value.func, value.args, value.keywords]
        elif not items:
            return False  # who knows what it holds
    if len(items) > 200:
        return False
    into += kind, len(items)
    for x in items:
        if type(x) in _LEAVES:
            into.append(x)
        elif not is_flattened(x, into, depth - 1):
            return False
    return True


def parts_of(module):
    # What `Known` compares of a module and its parts, and attributes that can be edited, by what
    # they hold; None where that cannot be compared.
    found, edited, left, seen = [], [], [module], set()
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        held = part.__dict__
        names = _PUBLIC[tuple(held)]
        own = None if part is module else weakref.ref(part)
        same = [name for name in names if is_constant(held[name])]
        for name in set(names).difference(same):
            before = []
            if not is_flattened(held[name], before):
                return None
            edited.append((own, name, before))
        tables = held["_parameters"], held["_buffers"], held["_modules"]
        parts = [*tables[2].values()]
        found.append((
            own, type(part), len(held), same, [held[name] for name in same],
            [name for table in tables for name in table],
            [type(None) if x is None else weakref.ref(x) for x in parts],
        ))  # fmt: skip
        left += [x for x in parts if x is not None]
    return found, edited


def places_of(module, parts, tensors):
    # In which tables of the parts the tensors are, further places of the same, and where there is
    # nothing. None where one is in no table.
    held = [(module if part is None else part()).__dict__ for part, *_ in parts]
    tables = [each[name] for each in held for name in ("_parameters", "_buffers")]
    first, tied, absent = {}, [], []
    for i, table in enumerate(tables):
        for key, x in table.items():
            if x is None:
                absent.append((i, key))
            elif (place := first.setdefault(id(x), (i, key))) != (i, key):
                tied.append((i, key, *place))
    places = [first.get(id(x)) for x in tensors]
    return None if None in places else (places, tied, absent)


def guards_of(tensors):
    # What asks whether others are like these; None where that cannot be asked.
    if any(type(x) not in _TENSORS for x in tensors) or len({*map(id, tensors)}) < len(tensors):
        return None
    return TensorGuards(
        *tensors,
        dynamic_dims_sizes=[[*x.shape] for x in tensors],
        dynamic_dims_strides=[[*x.stride()] for x in tensors],
    )


def is_watched():
    # Whether PyTorch has to see the operations of a call.
    return (
        has_function_mode()
        or {watched}        or torch.nn.modules.module._has_any_global_hook()
        or torch.get_default_dtype() != _DEFAULT_DTYPE
    )


def known_call(module, *inputs):
    # What `usual_state` would return, and the call; None: it has to be asked.
    if not _KNOWS_CALLS or torch.compiler.is_compiling() or is_watched():
        return None, None
    known = _KNOWN.get((id(module), module.training))
    if known is None or known.module() is not module:
        return None, None
    form = [torch.is_grad_enabled()]
    for x in inputs:
        if type(x) is float:  # whose value kernels are given
            form.append(float)
        elif type(x) not in _TENSORS or x.is_nested:
            return None, None
        else:
            form.append(x.shape)
    call = known.calls.get(tuple(form))
    if call is None:
        return None, None
    tensors = known.tensors_of(module)
    if tensors is None:
        known.forget()
        return None, None
    if float in form:
        inputs = [x for x in inputs if type(x) is not float]
    if not call.guards.check(*inputs, *tensors):
        return None, None
    return dict(zip(known.names, tensors)), call


def remember(module, state, is_step, *inputs):
    # For `known_call`: of a call that kernels take. With labels, which a CPU looks at, none is.
    if not _KNOWS_CALLS or torch.compiler.is_compiling() or _PLACES or is_watched():
        return
    form = [float if type(x) is float else getattr(x, "shape", None) for x in inputs]
    guards = guards_of([x for x in (*inputs, *state.values()) if type(x) is not float])
    if guards is None:
        return
    key = id(module), module.training
    known = _KNOWN.get(key)
    if known is not None and known.module() is not module:
        known = None
    if known is None or known.tensors_of(module) is None:
        changes = 0 if known is None else known.changes + 1
        parts = parts_of(module) if changes < _MOST_CHANGES else None
        if parts is None:
            return
        known = _KNOWN[key] = Known(module, *parts, state, changes)
    if len(known.calls) >= 64:  # as many numbers of rows, say
        known.calls.clear()
    known.calls[(torch.is_grad_enabled(), *form)] = KnownCall(guards, is_step)


""".replace("{watched}", WATCHED_TEXT.lstrip())
