# Calls of a function whose launches an earlier call has shown. The text has `torch` and `triton`.
#
# What such a function makes and launches depends on its arguments' form alone: dtypes, shapes,
# strides, numbers. Its first call of a form is watched. Later ones make what it allocated as one
# block, in which what is not needed at the same time shares memory, and what it returns apart; C
# puts addresses in their places, and launches by CUDA's driver: what Python and Triton ask for each
# launch takes the host ten times as long.

import contextlib
import threading
from functools import update_wrapper

from torch.utils._python_dispatch import TorchDispatchMode

REPLAYS = True  # False only in tests, which compare
REPLAY_DEVICE = "cuda"  # the kind of device whose addresses kernels are given
REPLAY_DRIVER = "libcuda.so.1"
REPLAY_MOST_GRAPHS = 64  # of a form; eight times as many of all
REPLAY_ROOM_BYTES = 256  # what lies in one block begins at multiples of these
# Of PyTorch's operations those that make memory, without a kernel; what makes zeros has one of the
# driver's in a replay. Views are free, and what is computed on the host depends on the form.
REPLAY_MAKING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros"}
REPLAY_FLOATS = {"fp32": "f", "fp64": "d"}  # of kernels' numbers, for `struct`; others are whole
REPLAY_PLAIN = (int, float, bool, type(None))
# One thread at a time watches a call, of all files like this one in a process: PyTorch up to 2.11
# fails where two threads are the first to dispatch an operation to Python ("expected !=
# self_interpreter").
REPLAY_WATCHING = vars(triton).setdefault("_watching_a_call", threading.Lock())


class NotReplayed(Exception):
    """Why calls of a form are not replayed."""


class LaunchRecorder(TorchDispatchMode):
    # What one call makes and launches, as it does it; `why` that does not suffice.

    def __init__(self):
        super().__init__()
        self.launches, self.made, self.zeroed, self.why = [], [], [], ""

    def __enter__(self):
        LAUNCH_RECORDING.recorder = self
        return super().__enter__()

    def __exit__(self, *raised):
        LAUNCH_RECORDING.recorder = None
        return super().__exit__(*raised)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        results = result if isinstance(result, (list, tuple)) else [result]
        if any(getattr(made, "is_" + REPLAY_DEVICE, True) for made in results) and not function.is_view:
            if name not in REPLAY_MAKING:
                self.why = self.why or f"it calls PyTorch's {name}"
            self.made += results
            self.zeroed += results if name == "zeros" else []
        return result


def in_rooms(num_bytes):
    return -(-num_bytes // REPLAY_ROOM_BYTES) * REPLAY_ROOM_BYTES


class ReplayPlaces:
    # Where the addresses of one call are from: its arguments, what it returns, or what it made
    # besides, which is one block in a replay, zeroed at its beginning.

    BEFORE = 3  # words of a call, which `launch_all` names; arguments and results follow

    def __init__(self, recorder, tensors, results):
        self.spans = []
        for t in (*tensors, *results):
            last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride()))
            first = t.data_ptr()
            self.spans.append((first, first + (last + 1) * t.element_size() * (t.numel() > 0)))
        # One tensor may be several arguments. Of others that share memory it is not known whose
        # an address is.
        ends, numbers = {}, {}
        self.equal = []
        for number, (first, end) in enumerate(self.spans):
            if numbers.setdefault(first, number) != number:
                self.equal.append((numbers[first], number))
            ends[first] = max(end, ends.get(first, 0))
        spans = sorted(ends.items())
        if any(one[1] > other[0] for one, other in zip(spans, spans[1:])):
            raise NotReplayed("arguments share memory")
        made = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in recorder.made}
        zeroed = {t.untyped_storage().data_ptr() for t in recorder.zeroed}
        for result in results:
            first = result.data_ptr()
            if made.pop(first, None) is None or first in zeroed or result.storage_offset():
                raise NotReplayed("it returns what it did not make, or twice, or made of zeros")
        self.rooms, self.num_bytes = {}, 0
        for first in zeroed:
            self.rooms[first] = self.num_bytes
            self.num_bytes += in_rooms(made[first].nbytes())
        self.num_zeroed_bytes = self.num_bytes
        self.share(recorder, {first: made[first].nbytes() for first in made if first not in zeroed})

    def share(self, recorder, num_bytes):
        # Room from a tensor's first launch to its last, the largest first, each where there is
        # some earliest in the block. A stream's launches are done in order.
        lives = {}
        for number, (_, _, arguments) in enumerate(recorder.launches):
            for given in arguments:
                if isinstance(given, torch.Tensor):
                    first = given.untyped_storage().data_ptr()
                    if first in num_bytes:
                        lives.setdefault(first, [number, number])[1] = number
        taken = []  # (where it begins, where it ends, its first launch, its last)
        for first in sorted(lives, key=num_bytes.get, reverse=True):
            begin, end = lives[first]
            at, size = self.num_zeroed_bytes, in_rooms(num_bytes[first])
            for its_at, its_end, its_begin, its_last in sorted(taken):
                if its_begin <= end and begin <= its_last and its_end > at:
                    if at + size <= its_at:
                        break
                    at = its_end
            taken.append((at, at + size, begin, end))
            self.rooms[first] = at
            self.num_bytes = max(self.num_bytes, at + size)

    def of(self, tensor):
        # Behind which of the call's words a tensor is, and how many bytes.
        address = tensor.data_ptr()
        for number, (first, end) in enumerate(self.spans, self.BEFORE):
            if first <= address < max(end, first + 1):
                return GivenNumber(number, address - first)
        first = tensor.untyped_storage().data_ptr()
        if first not in self.rooms:
            raise NotReplayed("a kernel reads what is no argument, and was not made by the call")
        return GivenNumber(1, self.rooms[first] + address - first)


class LaunchReplay:
    # What calls of a form make and launch; `recorder` watched one on `tensors`, which returned
    # `result`: nothing, or one tensor or several that it made.

    def __init__(self, recorder, tensors, result, driver, function):
        results = () if result is None else result if isinstance(result, tuple) else (result,)
        if recorder.why or not all(isinstance(made, torch.Tensor) for made in results):
            raise NotReplayed(recorder.why or "it returns other things")
        self.function, self.driver = function, driver
        self.library = launches_library()
        self.device, self.current = tensors[0].get_device(), torch.cuda.current_device
        self.stream_of = triton.runtime.driver.active.get_current_stream
        # By which torch.compile's files make tensors, in half of torch.empty_strided's time.
        self.made = getattr(torch._C._dynamo.guards, f"_empty_strided_{REPLAY_DEVICE}")
        self.places = ReplayPlaces(recorder, tensors, results)
        self.results = [(tuple(made.shape), made.stride(), made.dtype) for made in results]
        self.is_alone = isinstance(result, torch.Tensor)
        self.kept = []  # what launches point to
        launches = [
            self.call_of(what, how, arguments) if isinstance(how, str)
            else self.launch_of(what, how, arguments)
            for what, how, arguments in recorder.launches
        ]  # fmt: skip
        self.launches = (OneLaunch * len(launches))(*launches)
        self.num_launches = len(launches)
        # Of functions of C++ each launches several.
        self.has_graphs = len(launches) > 1 or not all(each.threads for each in launches)
        self.words = struct.Struct(f"={self.places.BEFORE + len(tensors) + len(results)}Q")
        # By its words, of which a loop has the same again and again: PyTorch gives out memory in
        # the same order. What is seen a second time becomes a graph.
        self.graphs, self.seen, self.num_without = {}, set(), 0

    def one(self, name, function, given, blocks=(0, 0, 0), threads=0, shared=0):
        if len(given) > (MOST_GIVEN if threads else MOST_GIVEN // 4):
            raise NotReplayed(f"{name} takes {len(given)} numbers")
        given = (GivenNumber * len(given))(*given)
        self.kept.append(given)
        return OneLaunch(
            name.encode(), function, given, len(given), (ctypes.c_uint32 * 3)(*blocks),
            threads, shared,
        )  # fmt: skip

    def launch_of(self, made, grid, arguments):
        # Of a kernel that Triton compiled, but those that it launches in clusters, say.
        facts, kinds = made.metadata, made.src.signature
        for name in ("launch_cooperative_grid", "launch_pdl", "global_scratch_size"):
            if getattr(facts, name, 0):
                raise NotReplayed(f"a kernel has {name}")
        if facts.num_ctas != 1 or len(kinds) != len(arguments) or 0 in grid:
            raise NotReplayed("a kernel is launched otherwise")
        given = []
        for kind, value in zip(kinds.values(), arguments):
            if isinstance(value, torch.Tensor):
                given.append(self.places.of(value))
            elif kind in REPLAY_FLOATS:
                bits = struct.pack(f"<{REPLAY_FLOATS[kind]}", value).ljust(8, b"\0")
                given.append(GivenNumber(-1, int.from_bytes(bits, "little")))
            elif kind != "constexpr":
                given.append(GivenNumber(-1, value & (2**64 - 1)))
        parameters = made.asm["ptx"].partition(".entry")[2].partition(")")[0]
        num_more = parameters.count(".param") - len(given)
        if not 0 <= num_more <= 2:  # rooms of Triton's, of no bytes
            raise NotReplayed("a kernel has parameters that are not known")
        given += num_more * [GivenNumber(-1, 0)]
        self.kept.append(made)
        return self.one(facts.name, made.function, given, grid, 32 * facts.num_warps, facts.shared)

    def call_of(self, function, name, arguments):
        # Of a function of C++, which takes the stream last.
        given = []
        for value in (*arguments, None):
            if not isinstance(value, torch.Tensor):
                value = GivenNumber(-1, (value or 0) & (2**64 - 1))
            elif value.device.type == REPLAY_DEVICE:
                value = self.places.of(value)
            else:  # on the host, made of numbers of the form: it stays where it is
                self.kept.append(value)
                value = GivenNumber(-1, value.data_ptr())
            given.append(value)
        given[-1] = GivenNumber(0, 0)
        self.kept.append(function)
        return self.one(name, ctypes.cast(function, ctypes.c_void_p).value, given)

    def again(self, pointers, arguments):
        # A call of this form, by the addresses of its tensors.
        if (
            not is_replaying()
            or self.current() != self.device  # where kernels start
            or any([pointers[a] != pointers[b] for a, b in self.places.equal])
        ):
            return self.function(*arguments)
        room, at = None, 0
        if num_bytes := self.places.num_bytes:
            room = self.made((num_bytes,), (1,), torch.uint8)
            at = room.data_ptr()
        made = [self.made(shape, stride, dtype) for shape, stride, dtype in self.results]
        words = self.words.pack(
            self.stream_of(self.device), at, self.places.num_zeroed_bytes,
            *pointers, *[each.data_ptr() for each in made],
        )  # fmt: skip
        graph = self.graphs.get(words)
        if graph is not None:
            said = self.library.launch_graph(self.driver, graph.address, words)
        if graph is None or said == b"captured":
            said = self.library.launch_all(self.driver, self.launches, self.num_launches, words)
            if self.has_graphs and said is None:
                self.noticed(words)
        if said is not None:
            if said == b"no context":  # of this thread, as yet: nothing was launched
                return self.function(*arguments)
            raise RuntimeError(said.decode(errors="replace"))
        return made[0] if self.is_alone else tuple(made) or None

    def noticed(self, words):
        # What was launched without a graph, and may be again.
        self.num_without += 1
        if self.num_without > 64 * REPLAY_MOST_GRAPHS:  # those that there are do not come back
            self.graphs, self.seen, self.num_without = {}, set(), 0
        if words not in self.seen:
            self.seen.add(words)
        elif (
            len(self.graphs) < REPLAY_MOST_GRAPHS
            and LaunchedGraph.num_alive < 8 * REPLAY_MOST_GRAPHS
        ):
            found, own = ctypes.c_void_p(), ctypes.create_string_buffer(words)
            said = self.library.make_graph(
                self.driver, self.launches, self.num_launches, own, ctypes.byref(found)
            )
            if said is None:
                self.graphs[words] = LaunchedGraph(found, self.driver)
            elif said != b"captured":  # an older driver, say
                self.has_graphs = False


def is_replaying():
    return REPLAYS and LAUNCHES_AT_ONCE and LAUNCH_RECORDING.recorder is None


class replayed:
    # A function of tensors and numbers, all of whose work is done by kernels. It returns nothing,
    # or one tensor or several, which it has made.

    def __init__(self, function):
        update_wrapper(self, function)
        self.function = function
        self.replays = {}  # by form; of None, calls are not replayed

    def __call__(self, *arguments):
        if not is_replaying():
            return self.function(*arguments)
        form, pointers = [], []
        for given in arguments:
            if isinstance(given, torch.Tensor):
                pointers.append(given.data_ptr())
                form += given.dtype, given.shape, given.stride(), pointers[-1] % 16
                form.append(given.get_device())
            elif type(given) in REPLAY_PLAIN:
                form.append(given)
            else:  # such as what a product has found for what is behind it
                return self.function(*arguments)
        return self.again(tuple(form), pointers, arguments)

    def again(self, form, pointers, arguments):
        # A call whose arguments' form is known, and where its tensors are.
        replay = self.replays.get(form, self)
        if replay is None:
            return self.function(*arguments)
        if replay is not self:
            return replay.again(pointers, arguments)
        first = arguments[0] if arguments and is_replaying() else None
        if not isinstance(first, torch.Tensor) or first.device.type != REPLAY_DEVICE:
            return self.function(*arguments)  # as where kernels are interpreted
        if first.get_device() != torch.cuda.current_device():  # where kernels start
            return self.function(*arguments)
        return self.watched(form, arguments)

    def watched(self, form, arguments):
        if not REPLAY_WATCHING.acquire(blocking=False):  # a later call of this form will do
            return self.function(*arguments)
        with contextlib.ExitStack() as stack:
            stack.callback(REPLAY_WATCHING.release)
            recorder = stack.enter_context(LaunchRecorder())
            result = self.function(*arguments)
        replay = None
        tensors = [given for given in arguments if isinstance(given, torch.Tensor)]
        with contextlib.suppress(NotReplayed, OSError):
            driver = launches_driver(REPLAY_DRIVER)
            replay = LaunchReplay(recorder, tensors, result, driver, self.function)
        if len(self.replays) >= 256:  # as many numbers of rows, say
            self.replays.clear()
        self.replays[form] = replay
        return result
