// What templates/_lib/wgmma_halves.cuh and wgmma_converted.cuh need of CUDA and of Hopper, for a
// host compiler: threads of a cluster take turns in any order, copies arrive when they like, and
// products are made only where they are waited for, of what shared memory has then.
#undef _FORTIFY_SOURCE  // it takes a jump from one stack to another for an error
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)

using std::isnan, std::max, std::min;
struct Dim { unsigned x; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static Dim threadIdx, blockIdx, gridDim;
static float __fmul_rn(float x, float y) { return x * y; }
static float __int_as_float(int x) { float y; std::memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned x) { return __int_as_float(int(x)); }
static int __float_as_int(float x) { int y; std::memcpy(&y, &x, 4); return y; }
static unsigned __float_as_uint(float x) { return unsigned(__float_as_int(x)); }
static int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> static T __ldg(const T* place) { return *place; }
template <class T> static T __ldcg(const T* place) { return *place; }

struct __half2 { _Float16 x, y; };
static __half2 __floats2half2_rn(float x, float y) { return {_Float16(x), _Float16(y)}; }
static float2 __half22float2(__half2 h) { return {float(h.x), float(h.y)}; }

namespace emulated {

constexpr int kMemory = 240 * 1024, kBase = 0x410;  // where dynamic shared memory may begin
constexpr int kStack = 256 * 1024;

static jmp_buf launched;
static const char* failure = nullptr;

// Ends a launch, which returns what went wrong.
[[noreturn]] static void fail(const char* what) {
  failure = what;
  _longjmp(launched, 1);
}

// ---- threads --------------------------------------------------------------------------------

struct Meeting {  // of some threads, each with a number
  int expected = 0, arrived = 0, generation = 0;
  std::vector<uint64_t> numbers[2];
};

struct Product {  // that a thread has begun
  float* sums;
  unsigned left[4];  // where these are registers
  uint64_t left_rows, right;
  int accumulate, group;
};

struct Thread {
  ucontext_t start;
  jmp_buf place;  // where it waits
  bool has_begun = false;
  unsigned index, rank;
  bool is_over = false;
  std::deque<Product> products;
  size_t begun = 0, done = 0;
  int group = 0;
};

struct Barrier { int count, pending, bytes; unsigned phase; };

struct Named { int arrived = 0, generation = 0; };  // a barrier of the hardware's

struct Block {
  std::vector<unsigned char> memory = std::vector<unsigned char>(kMemory);
  std::map<unsigned, Barrier> barriers;
  std::map<int, Named> named;
  int registers = 0;  // that its threads have asked for
  Meeting all;
  std::vector<Meeting> warps;
};

static std::vector<std::unique_ptr<Thread>> threads;
static std::vector<Block> blocks;
static Meeting cluster;
static Thread* own;
static jmp_buf scheduler;
static uint64_t progress;
static std::mt19937 random_numbers;
static std::function<void()> body;

static Block& block() { return blocks[own->rank]; }

// Go on with a thread until it waits. Jumps, since swapcontext asks the kernel for the signals that
// are let through: that was half of an emulation's time.
[[gnu::noinline]] static void go_on(Thread* thread) {
  if (_setjmp(scheduler) != 0) return;
  own = thread;
  if (thread->has_begun) _longjmp(thread->place, 1);
  thread->has_begun = true;
  setcontext(&thread->start);
}

[[gnu::noinline]] static void let_others() {
  if (_setjmp(own->place) == 0) _longjmp(scheduler, 1);
}

template <class Condition> static void wait_until(const Condition& condition) {
  while (!condition()) let_others();
  ++progress;
}

static std::vector<uint64_t>& meet(Meeting& at, int place, uint64_t number) {
  const int generation = at.generation;
  auto& numbers = at.numbers[generation % 2];
  numbers.resize(at.expected);
  numbers[place] = number;
  if (++at.arrived == at.expected) {
    at.arrived = 0;
    ++at.generation;
  }
  wait_until([&] { return at.generation != generation; });
  return numbers;
}

static std::vector<uint64_t>& meet_warp(uint64_t number) {
  return meet(block().warps[own->index / 32], own->index % 32, number);
}

static unsigned char* memory_of(unsigned rank, unsigned address, int bytes) {
  if (address < kBase || address + bytes > kMemory) fail("outside shared memory");
  return blocks[rank].memory.data() + address;
}

// Where the copy engine puts, and products read, what would lie at an address without a swizzle.
static unsigned swizzled(unsigned address, int row_bytes) {
  return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4;
}

// ---- copies ---------------------------------------------------------------------------------

struct Map {
  const unsigned char* data;
  int element;
  int64_t rows, columns, pitch;
  int box_rows, box_columns;
};

struct Copy { unsigned target, barrier, ranks; Map map; int64_t column, row; };
static std::deque<Copy> copies;
static int64_t num_copies = 0;  // that were begun

static Barrier& barrier_of(unsigned rank, unsigned address) {
  const auto found = blocks[rank].barriers.find(address);
  if (found == blocks[rank].barriers.end()) fail("no barrier there");
  return found->second;
}

static void settle(Barrier& of) {
  if (of.pending < 0) fail("too many arrivals");
  if (of.pending == 0 && of.bytes == 0) {
    of.pending = of.count;
    ++of.phase;
  }
}

static void arrive(unsigned rank, unsigned address, int bytes = 0) {
  Barrier& of = barrier_of(rank, address);
  of.bytes += bytes;
  --of.pending;
  settle(of);
  ++progress;
}

static void bring(const Copy& copy) {
  const Map& map = copy.map;
  const int row_bytes = map.box_columns * map.element;
  if (copy.target % (8 * row_bytes) != 0) fail("a box that begins within a swizzle");
  for (unsigned rank = 0; rank < blocks.size(); ++rank) {
    if ((copy.ranks >> rank & 1) == 0) continue;
    for (int r = 0; r < map.box_rows; ++r) {
      for (int c = 0; c < map.box_columns; ++c) {
        const unsigned to = copy.target + r * row_bytes + c * map.element;
        const int64_t row = copy.row + r, column = copy.column + c;
        unsigned char* place = memory_of(rank, swizzled(to, row_bytes), map.element);
        if (row < map.rows && column < map.columns) {
          std::memcpy(place, map.data + row * map.pitch + column * map.element, map.element);
        } else {
          std::memset(place, 0, map.element);
        }
      }
    }
    Barrier& of = barrier_of(rank, copy.barrier);
    of.bytes -= map.box_rows * row_bytes;
    settle(of);
  }
  ++progress;
}

// ---- products -------------------------------------------------------------------------------

static float half_of(unsigned packed, int which) {
  static const std::vector<float> known = [] {
    std::vector<float> all(65536);
    for (unsigned i = 0; i < 65536; ++i) {
      const uint16_t bits = uint16_t(i);
      _Float16 half;
      std::memcpy(&half, &bits, 2);
      all[i] = float(half);
    }
    return all;
  }();
  return known[packed >> 16 * which & 0xffff];
}

// As tensor cores do it: what is added up loses its last bits, whatever they are.
static float truncated(double x) {
  float y = float(x);
  if (std::isfinite(y) && std::fabs(double(y)) > std::fabs(x)) y = std::nextafter(y, 0.0f);
  return y;
}

// The 16 halves of a row of an operand that a matrix descriptor says where it lies. A swizzle
// leaves eight of them together.
static void read_row(uint64_t descriptor, int row, double (&numbers)[16]) {
  const unsigned start = (descriptor & 0x3fff) << 4;
  const unsigned eight_rows = (descriptor >> 32 & 0x3fff) << 4;
  const int row_bytes = 256 >> (descriptor >> 62);  // 128, 64 or 32
  const unsigned place = start + row / 8 * eight_rows + row % 8 * row_bytes;
  for (int k = 0; k < 16; k += 8) {
    uint16_t halves[8];
    std::memcpy(halves, memory_of(own->rank, swizzled(place + 2 * k, row_bytes), 16), 16);
    for (int i = 0; i < 8; ++i) numbers[k + i] = half_of(halves[i], 0);
  }
}

// The four threads that have a row have four numbers each of its 16.
static void make_product(size_t which, int columns) {
  const Product product = own->products[which];
  const unsigned quad = own->index / 4 * 4;
  const int member = own->index % 4;
  Thread* mates[4];
  for (int i = 0; i < 4; ++i) {
    mates[i] = threads[own->rank * (threads.size() / blocks.size()) + quad + i].get();
    wait_until([&] { return mates[i]->begun > which; });
  }
  double left[2][16];
  const int first = int(own->index % 128 / 32) * 16 + int(own->index % 32) / 4;
  for (int s = 0; s < 2 && product.left_rows != 0; ++s) {
    read_row(product.left_rows, first + 8 * s, left[s]);
  }
  for (int k = 0; k < 16 && product.left_rows == 0; ++k) {
    for (int s = 0; s < 2; ++s) {
      const Product& from = mates[k % 8 / 2]->products[which];
      if (from.right != product.right) fail("threads of a warp multiply by different operands");
      left[s][k] = half_of(from.left[k / 8 * 2 + s], k % 2);
    }
  }
  for (int j = 0; j < columns / 8; ++j) {
    for (int c = 0; c < 2; ++c) {
      double right[16];
      read_row(product.right, 8 * j + 2 * member + c, right);
      for (int s = 0; s < 2; ++s) {
        float& sum = product.sums[4 * j + 2 * s + c];
        double total = product.accumulate ? double(sum) : 0.0;
        for (int k = 0; k < 16; ++k) total += left[s][k] * right[k];
        sum = truncated(total);
      }
    }
  }
}

// ---- a launch -------------------------------------------------------------------------------

static void enter() {
  body();
  own->is_over = true;
  ++progress;
  _longjmp(scheduler, 1);
}

static char* stack_of(size_t thread) {  // used again: making one takes longer than a short kernel
  static std::vector<std::unique_ptr<char[]>> all;
  while (all.size() <= thread) all.emplace_back(new char[kStack]);
  return all[thread].get();
}

static void run_cluster(unsigned first_block, int num_blocks, int num_threads) {
  threads.clear();
  copies.clear();
  blocks = std::vector<Block>(num_blocks);
  cluster = Meeting{num_blocks * num_threads};
  for (int rank = 0; rank < num_blocks; ++rank) {
    blocks[rank].all.expected = num_threads;
    blocks[rank].warps = std::vector<Meeting>(num_threads / 32, Meeting{32});
    std::fill(blocks[rank].memory.begin(), blocks[rank].memory.end(), 0xff);  // NaN
    for (int i = 0; i < num_threads; ++i) {
      auto made = std::make_unique<Thread>();
      made->index = i;
      made->rank = rank;
      getcontext(&made->start);
      made->start.uc_stack.ss_sp = stack_of(threads.size());
      made->start.uc_stack.ss_size = kStack;
      makecontext(&made->start, enter, 0);
      threads.push_back(std::move(made));
    }
  }
  std::vector<Thread*> order;
  for (auto& thread : threads) order.push_back(thread.get());
  while (!order.empty()) {
    const uint64_t before = progress;
    if (random_numbers() % 4 == 0) std::shuffle(order.begin(), order.end(), random_numbers);
    for (Thread* thread : order) {
      threadIdx.x = thread->index;
      blockIdx.x = first_block + thread->rank;
      go_on(thread);
    }
    std::erase_if(order, [](Thread* thread) { return thread->is_over; });
    const size_t waiting = copies.size();
    for (size_t i = 0; i < waiting; ++i) {  // some, in any order
      std::swap(copies[0], copies[random_numbers() % copies.size()]);
      if (progress == before || random_numbers() % 2 == 0) {
        bring(copies[0]);
        copies.pop_front();
      }
    }
    if (progress == before && !order.empty()) fail("all wait for each other");
  }
  if (!copies.empty()) fail("copies nobody waited for");
}

}  // namespace emulated

template <class T> static T __shfl_xor_sync(unsigned, T value, int mask) {
  uint64_t number = 0;
  std::memcpy(&number, &value, sizeof(T));
  number = emulated::meet_warp(number)[(emulated::own->index % 32) ^ mask];
  std::memcpy(&value, &number, sizeof(T));
  return value;
}
static int __shfl_sync(unsigned, int value, int lane) {
  return int(emulated::meet_warp(unsigned(value))[lane]);
}
static bool is_any(const std::vector<uint64_t>& numbers) {
  return std::any_of(numbers.begin(), numbers.end(), [](uint64_t n) { return n != 0; });
}
static bool __any_sync(unsigned, bool value) { return is_any(emulated::meet_warp(value)); }
static unsigned __ballot_sync(unsigned, bool value) {
  const auto& numbers = emulated::meet_warp(value);
  unsigned votes = 0;
  for (size_t i = 0; i < numbers.size(); ++i) votes |= unsigned(numbers[i] != 0) << i;
  return votes;
}
static void __syncwarp() { emulated::meet_warp(0); }
static bool __syncthreads_or(int value) {
  return is_any(emulated::meet(emulated::block().all, emulated::own->index, value != 0));
}
static void __syncthreads() { __syncthreads_or(0); }
