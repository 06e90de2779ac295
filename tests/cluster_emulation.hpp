// What templates/_lib/cluster_rows.cuh needs of CUDA, for a host compiler: each thread of a cluster
// is one of the host's, and a thread of its own copies what was asked for, later and in any order.
#include <cassert>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <barrier>
#include <random>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct Dim { unsigned x; };
struct float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static thread_local Dim threadIdx, blockIdx, gridDim;
template <class T> static T max(T a, T b) { return a > b ? a : b; }
template <class T> static T min(T a, T b) { return a < b ? a : b; }
static float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }
static float __fmul_rn(float a, float b) { volatile float made = a * b; return made; }
static float __ldg(const float* place) { return *place; }
static void __stcs(float* place, float value) { *place = value; }
static void __stcs(float4* place, float4 value) {
  if (reinterpret_cast<uintptr_t>(place) % 16 != 0) std::abort();
  std::memcpy(static_cast<void*>(place), &value, 16);
}

namespace emulated {

constexpr int kMostBytes = 240 * 1024;

[[noreturn]] static void fail(const char* what) {
  std::fprintf(stderr, "emulation: %s\n", what);
  std::_Exit(1);
}

struct State {  // of an mbarrier, in its 64 bits
  uint8_t count, pending;
  uint16_t phase;
  int32_t bytes;
};
static_assert(sizeof(State) == 8);

struct BlockOf {
  alignas(128) char memory[kMostBytes];
  std::unique_ptr<std::barrier<>> some;
  std::vector<std::unique_ptr<std::barrier<>>> warps;
  std::vector<double> lanes;
  std::atomic<int> running{0};
};

struct Copy { char* target; const char* source; int bytes; uint64_t* barrier; };

static std::mutex lock;
static std::condition_variable changed, asked;
static std::deque<Copy> copies;
static bool is_over = false;
static std::vector<std::unique_ptr<BlockOf>> blocks;
static std::unique_ptr<std::barrier<>> all;
static thread_local BlockOf* mine;
static thread_local unsigned my_rank;
static thread_local bool has_met;  // whether this thread may reach other blocks
static uintptr_t allowed[8][2];  // what may be read by copies
static int num_allowed = 0;

static State& state_of(uint64_t* barrier) { return *reinterpret_cast<State*>(barrier); }

static void settle(State& of) {
  if (of.pending == 0 && of.bytes == 0) {
    of.pending = of.count;
    ++of.phase;
    changed.notify_all();
  }
}

static void engine() {
  std::mt19937 random(1);
  std::unique_lock<std::mutex> held(lock);
  while (true) {
    asked.wait(held, [] { return is_over || !copies.empty(); });
    if (copies.empty()) return;
    const size_t which = random() % copies.size();
    const Copy copy = copies[which];
    copies.erase(copies.begin() + which);
    held.unlock();
    if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
    std::memcpy(copy.target, copy.source, copy.bytes);
    held.lock();
    state_of(copy.barrier).bytes -= copy.bytes;
    settle(state_of(copy.barrier));
  }
}

// The same address in the memory of another block of the cluster.
template <class T>
static T* at(T* place, unsigned rank) {
  if (!has_met) fail("another block is reached before all are there");
  if (blocks[rank]->running == 0) fail("a block that has ended is reached");
  return reinterpret_cast<T*>(blocks[rank]->memory + (reinterpret_cast<char*>(place) - mine->memory));
}

static void arrive(uint64_t* barrier, int bytes) {
  std::lock_guard<std::mutex> held(lock);
  State& of = state_of(barrier);
  if (of.pending == 0) fail("more arrivals than a barrier counts");
  of.bytes += bytes;
  --of.pending;
  settle(of);
}

static void wait(uint64_t* barrier, unsigned parity) {
  std::unique_lock<std::mutex> held(lock);
  const bool done = changed.wait_for(held, std::chrono::seconds(60), [&] {
    return (state_of(barrier).phase & 1) != parity;
  });
  if (!done) fail("a wait for ever");
}

}  // namespace emulated

static void __syncwarp() { emulated::mine->warps[threadIdx.x / 32]->arrive_and_wait(); }
static double __shfl_xor_sync(unsigned, double value, int apart) {
  emulated::mine->lanes[threadIdx.x] = value;
  __syncwarp();
  const double found = emulated::mine->lanes[threadIdx.x ^ unsigned(apart)];
  __syncwarp();
  return found;
}

namespace cluster_memory {

static char* shared() { return emulated::mine->memory; }
static unsigned rank() { return emulated::my_rank; }
static void sync_cluster() {
  emulated::all->arrive_and_wait();
  emulated::has_met = true;
}
template <int kThreads>
static void sync_some() { emulated::mine->some->arrive_and_wait(); }
static void init(uint64_t* barrier, int arrivals) {
  emulated::state_of(barrier) = {uint8_t(arrivals), uint8_t(arrivals), 0, 0};
}
static void publish_barriers() {}
static void wait(uint64_t* barrier, unsigned parity) { emulated::wait(barrier, parity); }
static void wait_for_cluster(uint64_t* barrier, unsigned parity) { emulated::wait(barrier, parity); }
static void arrive(uint64_t* barrier) { emulated::arrive(barrier, 0); }
static void expect(uint64_t* barrier, int bytes) { emulated::arrive(barrier, bytes); }
static void copy(void* target, const void* source, int bytes, uint64_t* barrier) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(source);
  char* const to = static_cast<char*>(target);
  if (from % 16 || reinterpret_cast<uintptr_t>(target) % 16 || bytes % 16 || bytes <= 0) {
    emulated::fail("a copy that is not aligned");
  }
  bool is_allowed = to >= shared() && to + bytes <= shared() + emulated::kMostBytes;
  bool is_inside = false;
  for (int i = 0; i < emulated::num_allowed; ++i) {
    is_inside |= from >= emulated::allowed[i][0] && from + bytes <= emulated::allowed[i][1];
  }
  if (!is_allowed || !is_inside) emulated::fail("a copy outside");
  std::memset(target, 0xff, bytes);  // NaN, for those who do not wait
  std::lock_guard<std::mutex> held(emulated::lock);
  emulated::copies.push_back({to, static_cast<const char*>(source), bytes, barrier});
  emulated::asked.notify_one();
}
static void fence_copies() {}
static void store_at(double* place, unsigned rank, double value) {
  *emulated::at(place, rank) = value;
}
static void tell(uint64_t* barrier, unsigned rank) { emulated::arrive(emulated::at(barrier, rank), 0); }

}  // namespace cluster_memory

// Which floats copies may read: of the tensors.
extern "C" void allow(const float* first, int64_t count) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(first);
  emulated::allowed[emulated::num_allowed][0] = from;
  emulated::allowed[emulated::num_allowed++][1] = from + 4 * uintptr_t(count);
}

namespace emulated {

// Runs a kernel of blocks in clusters, one cluster after the other.
template <class Kernel, class... Arguments>
static void run(int clusters, int num_blocks, int threads, int consumers, Kernel kernel,
                Arguments... arguments) {
  for (int cluster = 0; cluster < clusters; ++cluster) {
    blocks.clear();
    for (int rank = 0; rank < num_blocks; ++rank) {
      blocks.push_back(std::make_unique<BlockOf>());
      BlockOf& block = *blocks.back();
      block.some = std::make_unique<std::barrier<>>(consumers);
      for (int warp = 0; warp < threads / 32; ++warp) {
        block.warps.push_back(std::make_unique<std::barrier<>>(32));
      }
      block.lanes.resize(threads);
      block.running = threads;
    }
    all = std::make_unique<std::barrier<>>(num_blocks * threads);
    is_over = false;
    std::thread copying(engine);
    std::vector<std::thread> running;
    for (int rank = 0; rank < num_blocks; ++rank) {
      for (int thread = 0; thread < threads; ++thread) {
        running.emplace_back([=] {
          mine = blocks[rank].get();
          my_rank = unsigned(rank);
          threadIdx.x = unsigned(thread);
          blockIdx.x = unsigned(cluster * num_blocks + rank);
          gridDim.x = unsigned(clusters * num_blocks);
          has_met = false;
          kernel(arguments...);
          --mine->running;
        });
      }
    }
    for (std::thread& thread : running) thread.join();
    {
      std::lock_guard<std::mutex> held(lock);
      if (!copies.empty()) fail("a copy that nobody waited for");
      is_over = true;
      asked.notify_one();
    }
    copying.join();
  }
}

}  // namespace emulated

// In place of cluster_launch.cuh. Two clusters at most, so that each takes several rows.
#define CLUSTER_START                                                                         \
  namespace cluster_rows {                                                                    \
  template <auto kernel, class... Arguments>                                                  \
  static const char* start(int64_t rows, void*, Arguments... arguments) {                     \
    static_assert(kSharedBytes <= emulated::kMostBytes);                                      \
    emulated::run(int(rows < 2 ? rows : 2), kBlocks, kThreads, kConsumers, kernel,            \
                  arguments...);                                                              \
    return nullptr;                                                                           \
  }                                                                                           \
  }
