// A large fresh output costs a page fault for every 4 KB when it is first written, which can take
// longer than computing it. Linux maps 2 MB at a time where a program asks for it.
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pages {

static inline void prefer_huge(void* start, int64_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 65536;  // a multiple of every usual page
  const uintptr_t first = (reinterpret_cast<uintptr_t>(start) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(start) + num_bytes) / page * page;
  if (end >= first + (uintptr_t(4) << 20)) {  // smaller ones hold no whole huge page to speak of
    madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // a hint: may be refused
  }
#else
  (void)start;
  (void)num_bytes;
#endif
}

}  // namespace pages
