"""Memory of large results on a CPU: handed out again when a result is gone, never before."""

from __future__ import annotations

import os
import resource
import sys
import threading
from collections.abc import Callable

import psutil
import pytest
import torch

from tuner.export.registration import built_alone
from tuner.kernel import kept_memory
from tuner.kernel.toolchain import Toolchain

Make = Callable[[list[int]], torch.Tensor]
LARGE = [9 << 20]  # float32: 36 MB
STABLE_LIBRARY = "torch/csrc/stable/library.h"

# Registered as exported files are, with their headers and flags: they are precompiled.
REGISTERED = """
void made(StableIValue* stack, uint64_t, uint64_t) {
  const std::unique_ptr<at::Tensor> like(reinterpret_cast<at::Tensor*>(stack[0]));
  const std::unique_ptr<at::Tensor> shape(reinterpret_cast<at::Tensor*>(stack[1]));
  const at::IntArrayRef sizes(shape->const_data_ptr<int64_t>(), shape->numel());
  at::Tensor result = kept_memory_1::empty(*like, sizes, at::kFloat);
  stack[0] = reinterpret_cast<StableIValue>(new at::Tensor(std::move(result)));
}
void kept(StableIValue* stack, uint64_t, uint64_t) {
  stack[0] = kept_memory_1::free_blocks().num_bytes;
}

STABLE_TORCH_LIBRARY(tuner_kept_memory_test, m) {
  m.def("made(Tensor like, Tensor shape) -> Tensor");
  m.def("kept() -> int");
}
STABLE_TORCH_LIBRARY_IMPL(tuner_kept_memory_test, CompositeExplicitAutograd, m) {
  m.impl("made", &made);
  m.impl("kept", &kept);
}
"""


@pytest.fixture(scope="module", params=["search", "file"])
def make(request: pytest.FixtureRequest) -> Make:
    """What makes results while searching, and what an exported file holds, compiled."""
    if request.param == "search":
        return lambda shape: kept_memory.empty(shape, torch.float32)
    included = "\n".join(
        f"#include <{name}>"
        for name in (*kept_memory.HEADERS, "memory", "ATen/core/Tensor.h", STABLE_LIBRARY)
    )
    text = "\n".join([included, kept_memory.CPP, REGISTERED])
    flags = list(Toolchain.find("cpu").cpp_flags)
    built_alone("tuner_kept_memory_test", cpp_sources=[text], extra_cflags=flags)
    like = torch.empty(0)
    made = torch.ops.tuner_kept_memory_test.made
    return lambda shape: made(like, torch.tensor(shape, dtype=torch.int64, device="cpu"))


def is_handed_out_again(make: Make, holder: Callable[[torch.Tensor], object]) -> bool:
    """Hold a result for a while; whether its memory is what another result has afterwards."""
    result = make(LARGE).fill_(1.0)
    place = result.data_ptr()
    held = holder(result)
    del result
    others = [make(LARGE).fill_(2.0) for _ in range(3)]
    assert place not in {y.data_ptr() for y in others}
    del held
    return make(LARGE).data_ptr() == place


# What is given back while a thread of this process forks is let go instead: asked again then.
TRIES = 3


def test_what_a_result_held_is_handed_out_again_once_it_is_gone(make: Make) -> None:
    assert any(is_handed_out_again(make, lambda result: result) for _ in range(TRIES))


@pytest.mark.parametrize(
    "holder",
    [
        lambda y: y.view(2, -1),
        lambda y: y.numpy(),
        lambda y: torch.from_dlpack(y),
        lambda y: y.untyped_storage(),
        lambda y: [y.detach()],
    ],
    ids=["view", "numpy", "dlpack", "storage", "detached"],
)
def test_what_somebody_still_reads_is_not_handed_out(
    make: Make, holder: Callable[[torch.Tensor], object]
) -> None:
    assert any(is_handed_out_again(make, holder) for _ in range(TRIES))


def test_memory_that_went_to_another_process_is_left_alone(make: Make) -> None:
    result = make(LARGE).fill_(1.0)
    shared = result.share_memory_().detach()
    del result
    make(LARGE).fill_(2.0)
    assert shared.eq(1.0).all()


def test_a_result_is_as_any_other_tensor(make: Make) -> None:
    result = make(LARGE)
    assert (result.dtype, result.device.type, result.shape) == (torch.float32, "cpu", tuple(LARGE))
    assert result.is_contiguous() and not result._is_view() and not result.requires_grad
    assert result.data_ptr() % 64 == 0
    result.fill_(3.0)
    assert result.sum() == 3.0 * result.numel()
    assert make([2, 3]).shape == (2, 3)  # small ones are malloc's
    assert make([0, 1 << 30]).numel() == 0


@pytest.mark.parametrize("shape", [[3], LARGE])
def test_it_is_on_the_cpu_whatever_the_default_device_is(make: Make, shape: list[int]) -> None:
    with torch.device("meta"):
        made = make(shape)
    assert made.device.type == "cpu" and made.fill_(1.0).sum() == made.numel()


def test_a_smaller_result_takes_no_much_larger_block(make: Make) -> None:
    large = make([1 << 24])
    place = large.data_ptr()
    del large
    assert make(LARGE).data_ptr() != place
    assert make([(1 << 24) - 4096]).data_ptr() == place


def test_the_newest_block_is_taken_first(make: Make) -> None:
    first, second = make(LARGE), make(LARGE)
    places = first.data_ptr(), second.data_ptr()
    del first
    del second
    assert make(LARGE).data_ptr() == places[1]


def test_threads_never_have_the_same_memory(make: Make) -> None:
    wrong: list[object] = []

    def work(own: int) -> None:
        try:
            for _ in range(400):
                y = make(LARGE)
                y[::4096] = own
                if not bool(y[::4096].eq(own).all()):
                    wrong.append(own)
        except Exception as error:
            wrong.append(error)

    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(own,)) for own in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before_s)
    assert not wrong


def test_unwritten_numbers_are_nan_where_pytorch_makes_them_so(make: Make) -> None:
    make(LARGE).fill_(1.0)
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        assert make(LARGE).isnan().all()
    finally:
        torch.set_deterministic_debug_mode(before)


def test_no_more_than_the_limit_stays_when_all_results_are_gone(
    make: Make, request: pytest.FixtureRequest
) -> None:
    block_bytes = 64 << 20
    count = kept_memory.MOST_BYTES // block_bytes + 4
    results = [make([block_bytes // 4]) for _ in range(count)]
    before_bytes = kept_bytes(request)
    del results
    assert before_bytes < kept_bytes(request) <= kept_memory.MOST_BYTES
    assert kept_bytes(request) > kept_memory.MOST_BYTES - block_bytes


def test_what_is_larger_than_the_limit_is_not_kept_and_leaves_the_others(
    make: Make, request: pytest.FixtureRequest
) -> None:
    make(LARGE)
    before_bytes = kept_bytes(request)
    make([(kept_memory.MOST_BYTES >> 2) + 4096])
    assert kept_bytes(request) == before_bytes > 0


@pytest.mark.parametrize("make", ["file"], indirect=True)
def test_a_child_that_was_forked_keeps_nothing_of_its_parents(
    make: Make, request: pytest.FixtureRequest
) -> None:
    """Linux would copy each page that the parent writes again."""
    make(LARGE)
    assert kept_bytes(request) > 0
    child = os.fork()
    if child == 0:
        os._exit(1 if kept_bytes(request) else 0)
    assert os.waitpid(child, 0)[1] == 0
    assert kept_bytes(request) > 0


@pytest.mark.parametrize("make", ["file"], indirect=True)
@pytest.mark.skipif(sys.platform != "linux", reason="limits its own address space, as Linux does")
def test_what_is_kept_is_let_go_where_memory_is_short(
    make: Make, request: pytest.FixtureRequest
) -> None:
    results = [make([16 << 20]) for _ in range(12)]
    del results
    kept = kept_bytes(request)
    assert kept >= 12 * (64 << 20)
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_bytes = psutil.Process().memory_info().vms + (256 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, before[1]))
    try:
        assert make([128 << 20]).numel() == 128 << 20  # 512 MB
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def kept_bytes(request: pytest.FixtureRequest) -> int:
    """Return what is kept and nobody's."""
    if request.node.callspec.params["make"] == "search":
        return sum(block.nbytes() for block in kept_memory._free)
    return int(torch.ops.tuner_kept_memory_test.kept())
