"""Memory of large results on a CPU, kept for later calls once nobody has the result any more.

glibc gives a block of 32 MB and more back to Linux when it is freed and takes it again at the next
call, page by page as it is first written: 4096 x 4096 numbers take longer to be touched than to be
computed. What a storage held is handed out again after that storage is gone, never before, as by
PyTorch's own allocator for a GPU. `CPP` does that in an exported file, `empty` in a search.
"""

from __future__ import annotations

import ctypes
import math
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["CPP", "HEADERS", "LEAST_BYTES", "MOST_BYTES", "WORDS", "empty"]

LEAST_BYTES = 32 << 20  # smaller blocks stay with malloc, which keeps them itself
MOST_BYTES = 1 << 30  # that are kept while no tensor has them, in a process
WORDS = (
    f"of results of {LEAST_BYTES >> 20} MB and more is kept for later calls once they are gone, "
    f"{MOST_BYTES >> 20} MB a process at most (a file, where another compiler than g++ made it)"
)

_free: list[torch.UntypedStorage] = []  # the oldest first
_lock = threading.Lock()  # not waited for: the collector may give back in the middle of `_taken`


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the CPU whose numbers are whatever its memory held.

    Args:
        shape: its sizes.
        dtype: its type.
    """
    import torch

    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LEAST_BYTES or torch.are_deterministic_algorithms_enabled():
        return torch.empty(shape, dtype=dtype, device="cpu")  # whatever the default device is
    block = _taken(num_bytes)
    if block is None:
        block = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
    lent = (ctypes.c_char * num_bytes).from_address(block.data_ptr())
    weakref.finalize(lent, _given_back, block).atexit = False
    storage = torch.frombuffer(lent, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, tuple(shape))


def _taken(num_bytes: int) -> torch.UntypedStorage | None:
    """Return the newest block that holds so many bytes, and not many more."""
    if not _lock.acquire(blocking=False):
        return None
    try:
        for place in reversed(range(len(_free))):
            if num_bytes <= _free[place].nbytes() <= num_bytes + num_bytes // 4:
                return _free.pop(place)
        return None
    finally:
        _lock.release()


def _given_back(block: torch.UntypedStorage) -> None:
    if block.nbytes() > MOST_BYTES or not _lock.acquire(blocking=False):
        return
    try:
        _free.append(block)
        while sum(each.nbytes() for each in _free) > MOST_BYTES:
            del _free[0]
    finally:
        _lock.release()


HEADERS = ("pthread.h", "exception", "mutex", "new", "vector", "ATen/EmptyTensor.h")
CPP = f"""\
// Memory of large results, kept for later calls once no tensor has it: Linux maps fresh memory
// page by page as it is first written, which takes longer than most kernels. A process keeps
// {MOST_BYTES >> 20} MB at most, whatever its number of such files: g++ makes one object of
// what is static in an inline function.
namespace kept_memory_1 {{

struct Block {{
  c10::DataPtr data;
  size_t num_bytes;
}};

using Blocks = std::vector<std::unique_ptr<Block>>;

struct Free {{
  std::mutex mutex;
  Blocks blocks;  // the oldest first
  size_t num_bytes = 0;
}};

Free& free_blocks();

inline void let_go() {{
  Blocks dropped;  // given back to Linux when the lock is open again
  const std::lock_guard<std::mutex> lock(free_blocks().mutex);
  dropped.swap(free_blocks().blocks);
  free_blocks().num_bytes = 0;
}}

// A child that was forked has no use for what its parent keeps: as long as it has it, Linux copies
// each page that the parent writes.
inline void before_fork() {{ free_blocks().mutex.lock(); }}
inline void after_fork() {{ free_blocks().mutex.unlock(); }}
inline void in_child() {{
  free_blocks().mutex.unlock();
  let_go();
}}

inline Free* made() {{
  pthread_atfork(&before_fork, &after_fork, &in_child);
  return new Free;  // never deleted: tensors may outlive what is static
}}

inline Free& free_blocks() {{
  static Free* const only = made();
  return *only;
}}

inline void give_back(void* lent) {{
  std::unique_ptr<Block> block(static_cast<Block*>(lent));
  if (block->num_bytes > size_t({MOST_BYTES})) return;
  Blocks dropped;
  Free& kept = free_blocks();
  const std::unique_lock<std::mutex> lock(kept.mutex, std::try_to_lock);
  if (!lock) return;  // another thread is at it: not worth a wait
  try {{
    kept.blocks.reserve(kept.blocks.size() + 1);
    dropped.reserve(kept.blocks.size());
  }} catch (const std::bad_alloc&) {{
    return;
  }}
  kept.num_bytes += block->num_bytes;
  kept.blocks.push_back(std::move(block));
  while (kept.num_bytes > size_t({MOST_BYTES})) {{
    kept.num_bytes -= kept.blocks.front()->num_bytes;
    dropped.push_back(std::move(kept.blocks.front()));
    kept.blocks.erase(kept.blocks.begin());
  }}
}}

// The newest one, which may still be in a cache.
inline std::unique_ptr<Block> taken(size_t num_bytes) {{
  Free& kept = free_blocks();
  const std::unique_lock<std::mutex> lock(kept.mutex, std::try_to_lock);
  for (size_t place = lock ? kept.blocks.size() : 0; place-- > 0;) {{
    const size_t held = kept.blocks[place]->num_bytes;
    if (held < num_bytes || held > num_bytes + num_bytes / 4) continue;
    std::unique_ptr<Block> found = std::move(kept.blocks[place]);
    kept.blocks.erase(kept.blocks.begin() + place);
    kept.num_bytes -= held;
    return found;
  }}
  return nullptr;
}}

inline c10::DataPtr fresh(size_t num_bytes) {{
  c10::Allocator* const allocator = c10::GetAllocator(c10::DeviceType::CPU);
  try {{
    return allocator->allocate(num_bytes);
  }} catch (const std::exception&) {{  // there is no memory: perhaps with what is kept
    let_go();
    return allocator->allocate(num_bytes);
  }}
}}

struct Allocator final : c10::Allocator {{
  c10::DataPtr allocate(size_t num_bytes) override {{
    if (num_bytes < size_t({LEAST_BYTES})) return fresh(num_bytes);
    std::unique_ptr<Block> block = taken(num_bytes);
    if (!block) block.reset(new Block{{fresh(num_bytes), num_bytes}});
    void* const start = block->data.get();
    return {{start, block.release(), &give_back, c10::Device(c10::DeviceType::CPU)}};
  }}

  void copy_data(void* to, const void* from, size_t num_bytes) const override {{
    default_copy_data(to, from, num_bytes);
  }}
}};

inline at::Tensor empty(const at::Tensor& like, at::IntArrayRef shape, at::ScalarType dtype) {{
  const at::TensorOptions options = like.options().requires_grad(false);
  size_t num_bytes = c10::elementSize(dtype);
  for (const int64_t size : shape) num_bytes *= size;
  if (num_bytes < size_t({LEAST_BYTES})) return like.new_empty(shape, options.dtype(dtype));
  // PyTorch may have been told to fill what is fresh with NaN, and is asked for it then. A header
  // that says so takes 0.7 s to compile; where it is a NaN by chance, this call keeps nothing.
  const at::Tensor one = like.new_empty({{1}}, options.dtype(at::kDouble));
  const double number = *one.const_data_ptr<double>();
  if (number != number) return like.new_empty(shape, options.dtype(dtype));
  static Allocator* const allocator = new Allocator;
  return at::detail::empty_generic(shape, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}}

}}  // namespace kept_memory_1"""
