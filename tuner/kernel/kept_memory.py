"""Memory of large results on a CPU, kept for later calls once nobody has the result any more.

glibc gives a large block back to Linux when it is freed and takes it again at the next call, page
by page as it is first written: 4096 x 4096 numbers take longer to be touched than to be computed.
What a tensor held is handed out again after that tensor is gone, never before, as PyTorch's own
allocator for a GPU does. `CPP` is that in an exported file, `empty` the same in a search.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["CPP", "LEAST_BYTES", "MOST_BYTES", "WORDS", "empty"]

LEAST_BYTES = 4 << 20  # smaller blocks stay with malloc, which keeps them itself
MOST_BYTES = 1 << 30  # that are kept while no tensor has them, in a process
WORDS = (
    f"memory of results of {LEAST_BYTES >> 20} MB and more is kept when they are gone, for later "
    f"calls: at most {MOST_BYTES >> 20} MB a process"
)

_free: list[torch.UntypedStorage] = []  # the oldest first


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor on the CPU whose numbers are whatever its memory held.

    Args:
        shape: its sizes.
        dtype: its type.
    """
    import torch

    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LEAST_BYTES or torch.are_deterministic_algorithms_enabled():
        return torch.empty(shape, dtype=dtype)
    block = next((b for b in _free if _fits(b.nbytes(), num_bytes)), None)
    if block is None:
        block = torch.empty(num_bytes, dtype=torch.uint8).untyped_storage()
    else:
        _free.remove(block)
    lent = (ctypes.c_char * num_bytes).from_address(block.data_ptr())
    weakref.finalize(lent, _given_back, block).atexit = False
    storage = torch.frombuffer(lent, dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape))


def _fits(held_bytes: int, num_bytes: int) -> bool:
    """Whether a block holds what is asked for, and not much more."""
    return num_bytes <= held_bytes <= num_bytes + num_bytes // 4


def _given_back(block: torch.UntypedStorage) -> None:
    _free.append(block)
    while sum(each.nbytes() for each in _free) > MOST_BYTES:
        del _free[0]


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

struct Free {{
  std::mutex mutex;
  std::vector<std::unique_ptr<Block>> blocks;  // the oldest first
  size_t num_bytes = 0;
}};

inline Free& free_blocks() {{
  static Free* const made = new Free;  // never deleted: tensors may outlive what is static
  return *made;
}}

inline void give_back(void* lent) {{
  std::unique_ptr<Block> block(static_cast<Block*>(lent));
  Free& kept = free_blocks();
  // Another thread may be at it, or have been when this process was forked.
  const std::unique_lock<std::mutex> lock(kept.mutex, std::try_to_lock);
  if (!lock) return;
  kept.num_bytes += block->num_bytes;
  kept.blocks.push_back(std::move(block));
  while (kept.num_bytes > size_t({MOST_BYTES})) {{
    kept.num_bytes -= kept.blocks.front()->num_bytes;
    kept.blocks.erase(kept.blocks.begin());
  }}
}}

inline std::unique_ptr<Block> taken(size_t num_bytes) {{
  Free& kept = free_blocks();
  const std::unique_lock<std::mutex> lock(kept.mutex, std::try_to_lock);
  if (!lock) return nullptr;
  for (auto place = kept.blocks.begin(); place != kept.blocks.end(); ++place) {{
    const size_t held = (*place)->num_bytes;
    if (held < num_bytes || held > num_bytes + num_bytes / 4) continue;
    std::unique_ptr<Block> found = std::move(*place);
    kept.blocks.erase(place);
    kept.num_bytes -= held;
    return found;
  }}
  return nullptr;
}}

struct Allocator final : c10::Allocator {{
  c10::DataPtr allocate(size_t num_bytes) override {{
    c10::Allocator* const fresh = c10::GetAllocator(c10::DeviceType::CPU);
    if (num_bytes < size_t({LEAST_BYTES})) return fresh->allocate(num_bytes);
    std::unique_ptr<Block> block = taken(num_bytes);
    if (!block) block.reset(new Block{{fresh->allocate(num_bytes), num_bytes}});
    void* const start = block->data.get();
    return {{start, block.release(), &give_back, c10::Device(c10::DeviceType::CPU)}};
  }}

  void copy_data(void* to, const void* from, size_t num_bytes) const override {{
    default_copy_data(to, from, num_bytes);
  }}
}};

inline at::Tensor empty(const at::Tensor& like, at::IntArrayRef shape, at::ScalarType dtype) {{
  static Allocator* const allocator = new Allocator;
  if (at::globalContext().deterministicAlgorithms()) {{  // PyTorch fills what is fresh then
    return like.new_empty(shape, like.options().dtype(dtype).requires_grad(false));
  }}
  return at::detail::empty_generic(shape, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                   dtype, std::nullopt);
}}

}}  // namespace kept_memory_1"""
