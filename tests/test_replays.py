"""Calls that replay what an earlier one launched, by a driver of the host in place of CUDA's.

The text is the templates', and so are the bytes that reach the driver; the kernels are functions
of C, and Triton is what launches them the first time. On a GPU all tests of Triton's kernels that
call twice are of this.
"""

from __future__ import annotations

import ctypes
import operator
import subprocess
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_any_module import derive
from test_steps import gradients
from test_steps_of_halves import on_gpu

from tuner.capture.modules.known_text import KNOWN_TEXT
from tuner.evaluate.modules import imported
from tuner.export.module import export_text
from tuner.export.python_operators import python_binding, python_calls
from tuner.kernel.family import builtin_folder, load_family
from tuner.kernel.rendering import rendered
from tuner.machine.datasheets import known_device
from tuner.plans import Argument, Plan, Step, Tensor

SOURCE = Path(__file__).with_name("driver_of_the_host.c")
TEXTS = "launch", "launches", "replay"
PTX = ".visible .entry {name}(\n{parameters}\n)\n.maxntid 128\n{{ .param .b32 in_the_body; }}"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    made = tmp_path_factory.mktemp("driver") / "driver.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(made)], check=True)
    return ctypes.CDLL(str(made))


class Kernel:
    """What Triton makes of a kernel, and how it launches it."""

    def __init__(self, library, name: str, signature: dict[str, str]) -> None:
        self.arg_names = [*signature]
        self.library, self.num_looks = library, 0
        self.address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        kinds = [kind for kind in signature.values() if kind != "constexpr"]
        lines = [f".param .b64 {name}_param_{i}" for i in range(len(kinds) + 2)]
        self.made = SimpleNamespace(
            function=self.address,
            src=SimpleNamespace(signature=signature),
            asm={"ptx": PTX.format(name=name, parameters=",\n".join(lines))},
            metadata=SimpleNamespace(num_ctas=1, num_warps=4, shared=48, name=name),
        )

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            self.num_looks += 1
            self._launch(grid, arguments)
            made = SimpleNamespace(**vars(self.made))
            return type("Made", (), {**vars(made), "__getitem__": self._again})()

        return launch

    def _again(self, grid):
        def launch(*arguments):
            self.num_looks += 1
            self._launch(grid, arguments)

        return launch

    def _launch(self, grid, arguments) -> None:
        kinds = self.made.src.signature.values()
        values = []
        for kind, value in zip(kinds, arguments, strict=False):
            if isinstance(value, torch.Tensor):
                values.append(ctypes.c_void_p(value.data_ptr()))
            elif kind != "constexpr":
                values.append(ctypes.c_float(value) if kind == "fp32" else ctypes.c_int(value))
        values += [ctypes.c_void_p(), ctypes.c_void_p()]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        for block in range(grid[0]):
            kernel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint)(self.address)
            kernel(pointers, block)


@pytest.fixture
def text(library, monkeypatch):
    """The text's names, with kernels, and a function that uses all that is replayed."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # the host, of tensors there
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 7)
    triton = SimpleNamespace(
        __version__="3.6.0", JITFunction=Kernel,
        runtime=SimpleNamespace(driver=SimpleNamespace(active=active)),
    )  # fmt: skip
    include = "".join(f'{{% include "_lib/triton_{n}.py" %}}\n' for n in TEXTS)
    names: dict = {"torch": torch, "triton": triton}
    source = rendered(Path("t.py"), include, [builtin_folder()], {})
    exec(compile(source, "triton_replay.py", "exec"), names)
    names["REPLAY_DEVICE"] = "cpu"
    names["REPLAY_DRIVER"] = library._name
    library.set_context.argtypes = [ctypes.c_void_p]
    library.added.restype = ctypes.c_char_p
    library.added.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64, ctypes.c_void_p]
    scaled = names["launched"](
        Kernel(library, "scaled", {"x": "*fp32", "out": "*fp32", "count": "i32", "factor": "fp32"})
    )
    summed = names["launched"](
        Kernel(library, "summed", {
            "one": "*fp32", "other": "*fp32", "total": "*fp32", "out": "*fp32", "count": "i32",
            "more": "constexpr",
        })
    )  # fmt: skip
    state = SimpleNamespace(**names, names=names, library=library, scaled=scaled, summed=summed)
    state.num_calls, state.also = 0, None

    def work(x, other, none, out, count, factor):
        """out = x * factor + other, each plus the sum of all of these."""
        assert none is None
        state.num_calls += 1
        between = torch.empty(2, len(x) + 4)[1][4:]
        total = torch.zeros(1)
        scaled[(-(-count // 16),)](x, between, count, factor)
        summed[(1,)](between, other[1:], total, out, count, more=1)
        if state.also is not None:
            state.also(out)
        library_call(total, out, count)

    def library_call(total, out, count):
        message = library.added(total.data_ptr(), out.data_ptr(), count, 7)
        if message is not None:
            raise RuntimeError(f"added: {message.decode()}")
        if names["LAUNCH_RECORDING"].recorder is not None:
            names["LAUNCH_RECORDING"].recorder.launches.append(
                (library.added, "added", (total, out, count))
            )

    state.work = names["replayed"](work)
    return state


def expected(x, other, factor):
    both = x * factor + other[1:]
    return both + both.sum()


def check(text, x, other, factor=2.5, out=None) -> None:
    out = torch.full((len(x),), 7.0) if out is None else out
    wanted = expected(x, other, factor)
    text.work(x, other, None, out, len(x), factor)
    torch.testing.assert_close(out, wanted)


def drawn(seed: int, count: int = 40):
    torch.manual_seed(seed)
    return torch.randn(count), torch.randn(count + 1)


def test_later_calls_launch_the_same_on_other_tensors(text):
    check(text, *drawn(0))
    before = text.library.launches_so_far()
    for seed in range(1, 6):
        check(text, *drawn(seed))
    assert text.num_calls == 1 and text.library.launches_so_far() == before + 15
    assert text.scaled.kernel.num_looks == text.summed.kernel.num_looks == 1


def test_other_sizes_and_numbers_are_watched_on_their_own(text):
    for calls, (count, factor) in enumerate([(40, 2.5), (41, 2.5), (40, 0.5)], 1):
        check(text, *drawn(1, count), factor)
        check(text, *drawn(2, count), factor)
        assert text.num_calls == calls
    x, other = drawn(3, 80)
    check(text, x[::2].contiguous(), other[:41])
    check(text, x[4:44], other[:41])  # begins 16 bytes later
    assert text.num_calls == 3
    check(text, x[1:41], other[:41])  # or 4
    assert text.num_calls == 4


def test_one_tensor_for_two_arguments_is_no_other_form(text):
    """`out` is `x` in some calls: each is right, whichever was watched."""
    for first, later in ((True, False), (False, True)):
        text.work.replays.clear()
        for is_one in (first, later, first, later):
            x, other = drawn(3)
            check(text, x, other, out=x if is_one else None)
            assert len(text.work.replays) == 1


@pytest.mark.parametrize("why", ["operation", "global", "overlap", "result", "interpreted"])
def test_what_cannot_be_replayed_is_called_again(why, text):
    x, other = drawn(1)
    if why == "operation":
        text.also = lambda out: out.mul_(1)
    if why == "global":
        kept = torch.zeros(40)
        text.also = lambda out: text.scaled[(3,)](out, kept, 40, 1.0)
    if why == "overlap":
        both = torch.randn(81)
        x, other = both[:40], both[36:77]
    if why == "interpreted":
        text.scaled.is_known = False
    if why == "result":
        work = text.work.function
        text.work.function = lambda *arguments: (work(*arguments), 1)[1]
    for _ in range(3):
        check(text, x, other)
    assert text.num_calls == 3 and [*text.work.replays.values()] == [None]


def test_a_thread_without_a_context_gets_it_by_a_call(text):
    for _ in range(2):
        check(text, *drawn(1))
    text.library.set_context(None)
    check(text, *drawn(2))
    assert text.num_calls == 2
    text.library.set_context(1)
    check(text, *drawn(3))
    assert text.num_calls == 2


def test_what_a_function_says_is_raised_and_calls_go_on(text):
    with pytest.raises(RuntimeError, match="added: too many"):
        check(text, *drawn(1, 1001))
    assert text.work.replays == {} and text.names["LAUNCH_RECORDING"].recorder is None
    check(text, *drawn(1))
    check(text, *drawn(2))
    assert text.num_calls == 2


def test_what_the_driver_says_is_raised(text):
    text.scaled.kernel.made.metadata.num_warps = 8  # which this driver does not take
    check(text, *drawn(1))
    with pytest.raises(RuntimeError, match="scaled: CUDA's driver says 1"):
        check(text, *drawn(2))


def test_calls_of_many_threads_keep_their_own_tensors(text):
    check(text, *drawn(0))

    def one(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(50):
            x, other = torch.randn(40, generator=generator), torch.randn(41, generator=generator)
            check(text, x, other)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(one, seed) for seed in range(8)]:
            done.result()
    assert text.num_calls == 1


def test_one_thread_at_a_time_watches_a_call(text):
    """PyTorch 2.11 fails where two threads are the first to dispatch an operation to Python."""
    _, other = drawn(0)
    by_thread = []

    def call_in_another_thread(out) -> None:
        text.also = None
        with ThreadPoolExecutor(1) as pool:
            pool.submit(check, text, torch.randn(40), torch.cat([other, other])[1:42]).result()
        by_thread.append((text.num_calls, len(text.work.replays)))

    text.also = call_in_another_thread
    check(text, *drawn(0))
    assert by_thread == [(2, 0)] and len(text.work.replays) == 1


def test_calls_inside_of_a_watched_one_are_its_own(text):
    inner = text.work
    outer = text.replayed(lambda *arguments: inner(*arguments))
    for seed in range(3):
        x, other = drawn(seed)
        out = torch.empty(40)
        outer(x, other, None, out, 40, 2.5)
        torch.testing.assert_close(out, expected(x, other, 2.5))
    assert text.num_calls == 1 and not inner.replays and len(outer.replays) == 1


def test_launches_that_are_looked_at_are_not_replayed(text):
    text.names["LAUNCHES_AT_ONCE"] = False
    for seed in range(3):
        check(text, *drawn(seed))
    assert text.num_calls == 3 and text.scaled.kernel.num_looks == 3


def chain(text, links: int, makes=torch.empty):
    """A function of x that doubles it so often, each time into memory of its own."""

    def work(x):
        state = [x]
        for _ in range(links):
            state.append(makes(x.shape))
            text.scaled[(-(-len(x) // 16),)](state[-2], state[-1], len(x), 2.0)
        return state

    return work


@pytest.mark.parametrize("picked", [[-1], [-1, -2], [1, 4]])
def test_what_a_function_returns_is_made_anew_each_time(picked, text):
    made = chain(text, 4)
    is_alone = len(picked) == 1

    def picking(x):
        state = made(x)
        return state[picked[0]] if is_alone else tuple(state[i] for i in picked)

    work, kept = text.replayed(picking), []
    for seed in range(4):
        x, _ = drawn(seed, 100)
        found = work(x)
        kept.append((x, (found,) if is_alone else found))
    (replay,) = work.replays.values()
    for x, found in kept:
        for i, each in zip(picked, found, strict=True):
            torch.testing.assert_close(each, x * 2.0 ** (i % 5))
    pointers = [each.data_ptr() for _, found in kept for each in found]
    assert len({*pointers}) == len(pointers) and replay is not None


def test_a_known_call_looks_for_its_launches_by_the_operator_alone(text):
    """Its tensors are known but for where they are; of another layout nothing is remembered."""
    made, through = chain(text, 2), []
    work = text.replayed(lambda x: made(x)[-1])

    def op(*args):
        raise AssertionError("its kernels are called directly")

    op.work = work
    names = {"torch": torch, "nn": torch.nn, "types": types, "is_": operator.is_}
    names["detached"] = lambda op, *args: through.append(args) or (args[0] * 4,)
    exec(KNOWN_TEXT, names)
    known = names["KnownCall"](None, is_step=False)
    whole, _ = drawn(0, 208)

    def check(x) -> None:
        torch.testing.assert_close(known(op, x), (x * 4,))

    check(whole[::2])  # which is made contiguous first
    assert not known.replays and len(work.replays) == 1
    for begin in (0, 4, 8):
        check(whole[begin : begin + 104])
        assert known.replays == {op: work.replays[(work, (104,), torch.float32, -1)]}
    work.replays.clear()
    check(whole[16:120])
    assert not work.replays and not through
    check(whole[1:105])  # at no multiple of 16 bytes
    assert len(through) == 1 and not work.replays
    text.library.set_context(None)  # as of a thread that has none
    before = text.library.launches_so_far()
    check(whole[:104])
    text.library.set_context(1)
    assert text.library.launches_so_far() == before
    check(whole[:104])
    assert text.library.launches_so_far() == before + 2


def test_memory_is_shared_by_what_is_not_needed_at_the_same_time(text):
    """Of four links three are between: the first may lie where the third does."""
    made = chain(text, 4)
    work = text.replayed(lambda x: made(x)[-1])
    for seed in range(3):
        x, _ = drawn(seed, 100)
        torch.testing.assert_close(work(x), 16 * x)
    (replay,) = work.replays.values()
    assert replay.places.num_bytes == 2 * 512  # of 400 bytes each
    assert replay.places.num_zeroed_bytes == 0


def test_what_was_made_of_zeros_is_zeros_in_each_call(text):
    def work(x):
        total, out = torch.zeros(1), torch.empty(x.shape)
        for _ in range(2):
            text.summed[(1,)](x, x, total, out, len(x), more=1)
        last = torch.empty(x.shape)
        text.summed[(1,)](out, total.expand(1), total, last, 1, more=1)
        return last

    work = text.replayed(work)
    for seed in range(3):
        x, _ = drawn(seed, 64)
        torch.testing.assert_close(work(x)[0], 2 * x[0] + 4 * x.sum())


@pytest.mark.parametrize("why", ["given", "twice", "view", "zeros", "list"])
def test_what_is_returned_otherwise_is_not_replayed(why, text):
    made = chain(text, 2, torch.zeros if why == "zeros" else torch.empty)
    returned = {
        "given": lambda state: (state[0], state[2]), "twice": lambda state: (state[2], state[2]),
        "view": lambda state: state[2][1:], "zeros": lambda state: state[2],
        "list": lambda state: [state[2]],
    }[why]  # fmt: skip
    work = text.replayed(lambda x: returned(made(x)))
    for seed in range(3):
        x, _ = drawn(seed)
        found = work(x)
        last = found[-1] if isinstance(found, (tuple, list)) else found
        torch.testing.assert_close(last, 4 * x[1:] if why == "view" else 4 * x)
    assert [*work.replays.values()] == [None]


def linked(text, links: int = 3, is_alone: bool = True):
    """A function whose calls end in memory that the caller gives, and the replay of these.

    Where one thread calls it, memory between is at the same place each time, as CUDA's is.
    """
    made, places = chain(text, links), {}
    empty = torch._C._dynamo.guards._empty_strided_cpu

    def placed(shape, stride, dtype):
        if shape not in places:
            places[shape] = empty(shape, stride, dtype)
        return places[shape]

    def work(x, out):
        text.summed[(1,)](made(x)[-1], x, torch.zeros(1), out, len(x), more=1)

    work = text.replayed(work)
    work(torch.randn(40), torch.empty(40))
    (replay,) = work.replays.values()
    if is_alone:
        replay.made = placed
    return work, replay


def check_linked(work, x, out, links: int = 3) -> None:
    out.fill_(9)
    work(x, out)
    torch.testing.assert_close(out, (2.0**links + 1) * x)


def test_what_comes_back_at_the_same_addresses_is_launched_as_a_graph(text):
    """From the third time on; the numbers that lie there are others each time."""
    work, replay = linked(text)
    before = text.library.graph_launches_so_far()
    x, out = torch.randn(40), torch.empty(40)
    for calls in range(1, 7):
        check_linked(work, x.normal_(), out)
        assert text.library.graph_launches_so_far() - before == max(0, calls - 2)
    assert len(replay.graphs) == 1
    for other in [torch.empty(40) for _ in range(3)]:
        check_linked(work, x, other)
    assert text.library.graph_launches_so_far() - before == 4


def test_calls_that_somebody_captures_are_launched_one_by_one(text):
    work, replay = linked(text)
    x, out = torch.randn(40), torch.empty(40)
    text.library.set_capturing(1)
    try:
        for _ in range(5):
            check_linked(work, x, out)
        assert not replay.graphs and replay.has_graphs
        text.library.set_capturing(0)
        for _ in range(4):
            check_linked(work, x, out)
        assert replay.graphs
        text.library.set_capturing(1)
        before = text.library.graph_launches_so_far()
        check_linked(work, x, out)
        assert text.library.graph_launches_so_far() == before
    finally:
        text.library.set_capturing(0)


def test_where_the_driver_makes_no_graph_launches_stay_single(text):
    work, replay = linked(text, 70)  # more than this driver takes
    x, out = torch.randn(40) / 2.0**70, torch.empty(40)
    for _ in range(6):
        check_linked(work, x, out, 70)
    assert not replay.has_graphs and not replay.graphs


def test_graphs_are_few_and_those_that_do_not_come_back_end(text):
    text.names["REPLAY_MOST_GRAPHS"] = most = 2
    work, replay = linked(text)
    there = text.library.graphs_there_are()
    x, outs = torch.randn(40), [torch.empty(40) for _ in range(4)]
    for out in outs * 4:
        check_linked(work, x, out)
    assert len(replay.graphs) == text.library.graphs_there_are() - there == most
    first = replay.graphs
    for out in outs * 80:  # half of these calls have a graph
        check_linked(work, x, out)
    assert replay.graphs is not first
    first = None
    assert text.library.graphs_there_are() - there <= most
    work.replays.clear()
    replay = None
    assert text.library.graphs_there_are() == there


def test_graphs_of_many_threads_are_of_their_own_tensors(text):
    work, _ = linked(text, is_alone=False)

    def one(seed: int) -> None:
        generator, x, out = torch.Generator().manual_seed(seed), torch.empty(40), torch.empty(40)
        for _ in range(100):
            check_linked(work, x.normal_(generator=generator), out)

    before = text.library.graph_launches_so_far()
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(one, seed) for seed in range(8)]:
            done.result()
    assert text.library.graph_launches_so_far() > before


def doubled(inputs: int, more: tuple[Step, ...] = ()) -> Plan:
    """A call that makes `y`, four times `x`, by way of what it keeps in between."""
    arguments = tuple(Argument(name, shape=("rows",)) for name in "xw"[:inputs])
    steps = (Step("call", "twice", ("x", "z")), Step("call", "twice", ("z", "y")))
    return Plan(
        "doubled", arguments, (Tensor("y", ("rows",)),), (Tensor("z", ("rows",)),), (*steps, *more)
    )


def test_a_whole_call_of_an_exported_file_is_replayed(text):
    def twice(x, out):
        text.num_calls += 1
        text.scaled[(-(-len(x) // 16),)](x, out, len(x), 2.0)

    namespace, plan = "tests_of_replays", doubled(1)
    written = f"{python_calls(plan, namespace, True)}\n\n{python_binding(plan, namespace)}"
    assert 'device.type != "cuda"' in written
    names = {**text.names, "twice": twice}
    exec(written.replace('device.type != "cuda"', "False"), names)
    for seed in range(5):
        x, _ = drawn(seed)
        torch.testing.assert_close(names["called_doubled"](x), 4 * x)
    # The operator's own call, and the first one past it; both launch twice.
    assert text.num_calls == 4 and None not in names["_work_doubled"].replays.values()
    names["called_doubled"](drawn(1, 48)[0])
    assert text.num_calls == 6


@pytest.mark.parametrize("plan, replays, is_replayed", [
    (doubled(1), True, True),
    (doubled(1), False, False),
    (doubled(2), True, True),
    (doubled(1, (Step("aten", "relu", ("y",), out="y"),)), True, False),
    (doubled(1, (Step("aten", "relu", ("y",), gives="v"),)), True, False),
])  # fmt: skip
def test_calls_that_are_kernels_alone_are_replayed_where_the_text_can(plan, replays, is_replayed):
    assert ("@replayed" in python_calls(plan, "mine", replays)) == is_replayed


# ---- on a GPU ---------------------------------------------------------------------------------


def replayed_on_gpu(folder: Path, name: str):
    """A module with gradients by kernels, the names of its text, and its functions' replays."""
    taken = on_gpu(folder, name)
    names = taken.module["fused_op"].globals
    functions = [f for f in names.values() if type(f).__name__ == "replayed"]
    return taken, names, lambda: [r for f in functions for r in f.replays.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["norm", "chain", "in_rows", "turned", "alone", "large"])
def test_steps_that_are_replayed_give_the_same_bits(name, tmp_path):
    taken, names, replays = replayed_on_gpu(tmp_path, name)
    for batch in (None, 129):
        names["REPLAYS"] = False
        wanted = [gradients(taken.mine, taken.inputs(seed, batch)) for seed in range(4)]
        names["REPLAYS"] = True
        for _ in range(3):
            for seed, each in enumerate(wanted):
                made = gradients(taken.mine, taken.inputs(seed, batch))
                assert all(torch.equal(a, b) for a, b in zip(made, each, strict=True))
        if batch is None:  # of few rows some products are PyTorch's
            assert len(replays()) > 1 and None not in replays()


@pytest.mark.gpu
def test_a_replay_is_on_the_current_stream_in_graphs_and_in_any_thread(tmp_path):
    taken, names, replays = replayed_on_gpu(tmp_path, "chain")
    (x,), (other,) = taken.inputs(1), taken.inputs(2)
    with torch.no_grad():
        names["REPLAYS"] = False
        wanted = [taken.mine(given) for given in (x, other)]
        names["REPLAYS"] = True
        assert torch.equal(taken.mine(x), wanted[0]) and None not in replays()
        graph, held = torch.cuda.CUDAGraph(), x.clone()
        with torch.cuda.graph(graph):
            made = taken.mine(held)
        for given, right in ((other, wanted[1]), (x, wanted[0])):
            held.copy_(given)
            graph.replay()
            assert torch.equal(made, right)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            held.copy_(other)
            made = taken.mine(held)
        side.synchronize()
        assert torch.equal(made, wanted[1])

    def one(seed: int) -> bool:
        with torch.no_grad():
            (given,) = taken.inputs(seed % 2 + 1)
            return all(torch.equal(taken.mine(given), wanted[seed % 2]) for _ in range(20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(one, range(8)))


NORMED = """\
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(768)

    def forward(self, x):
        return torch.nn.functional.silu(self.norm(x)) * x, x.sum(0)


def get_inputs():
    return [torch.randn(512, 768)]


def get_init_inputs():
    return []
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_whole_calls_and_steps_of_an_exported_file_give_the_same_bits(tmp_path):
    _, made = derive(tmp_path, "normed", NORMED)
    family = load_family(made.name, [made.folder])
    candidate = family.render({"template": "nest_triton"}, known_device("H200").facts())
    path = tmp_path / "exported.py"
    path.write_text(
        export_text(family, candidate, reference=NORMED, sizes={}, flags=[], provenance=[])
    )
    module = imported(path)
    works = [w for name, w in vars(module).items() if name.startswith("_work_")]
    assert works and all(type(work).__name__ == "replayed" for work in works)

    def results() -> list[torch.Tensor]:
        model, found = module.ModelNew().cuda(), []
        torch.manual_seed(3)
        for batch in (512, 512, 130, 512, 130, 130):
            x = torch.randn(batch, 768, device="cuda")
            with torch.no_grad():
                found += model(x)
            x.requires_grad_()
            made = model(x)
            found += made
            found += torch.autograd.grad(
                made, [x, *model.parameters()], [torch.randn_like(y) for y in made]
            )
        return [*found, *model.buffers()]

    module.REPLAYS = False
    wanted = results()
    assert not any(work.replays for work in works)
    module.REPLAYS = True
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(results(), wanted, strict=True))
    replays = [replay for work in works for replay in work.replays.values()]
    assert len(replays) > 1 and None not in replays
