// In place of templates/_lib/launch.cuh, wgmma_tensor_map.cuh and wgmma_pipeline.cuh, and of what
// wgmma_products.cuh is made to (`EMULATED_PRODUCTS`, for a number of columns), on a CPU.
#define EMULATED_PRODUCTS(num_columns)                                                          \
  namespace wgmma_products {                                                                    \
  enum class Type { kFloat16 };                                                                 \
  constexpr int kColumns = num_columns, kStepBytes = 32, kSums = kColumns / 2;                  \
  template <int kRowBytes> uint64_t descriptor(unsigned address) {                              \
    constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;               \
    return kSwizzle << 62 | uint64_t{8 * kRowBytes / 16} << 32 | (address & 0x3ffff) >> 4;      \
  }                                                                                             \
  inline void begin() {}                                                                        \
  inline void commit() { ++emulated::own->group; }                                              \
  template <int kPending> void wait() {                                                         \
    emulated::Thread& own = *emulated::own;                                                     \
    for (; own.done < own.begun; ++own.done) {                                                  \
      if (own.products[own.done].group >= own.group - kPending) break;                          \
      emulated::make_product(own.done, kColumns);                                               \
    }                                                                                           \
    emulated::meet_warp(0); /* a warp waits as one */                                           \
  }                                                                                             \
  template <class T> void pin(T&) {}                                                            \
  template <class T> void hold(const T&) {}                                                     \
  template <Type>                                                                               \
  void multiply_registers(float (&sums)[kSums], const unsigned (&left)[4], uint64_t right,      \
                          int accumulate) {                                                     \
    emulated::Thread& own = *emulated::own;                                                     \
    own.products.push_back({sums, {left[0], left[1], left[2], left[3]}, 0, right, accumulate,   \
                            own.group});                                                        \
    ++own.begun;                                                                                \
  }                                                                                             \
  template <Type>                                                                               \
  void multiply(float (&sums)[kSums], uint64_t left, uint64_t right, int accumulate) {          \
    emulated::Thread& own = *emulated::own;                                                     \
    own.products.push_back({sums, {}, left, right, accumulate, own.group});                     \
    ++own.begun;                                                                                \
  }                                                                                             \
  }

namespace emulated::warp_products {  // of templates/_lib/warp_products.cuh

struct Given { const unsigned *left, *right; };

inline float first_of(unsigned pair) { return __uint_as_float(pair << 16); }
inline float second_of(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }
inline unsigned rounded(float number) {  // to eight bits, half-way to even
  const unsigned bits = __float_as_uint(number);
  if (isnan(number)) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned pair_of(float first, float second) {
  return rounded(second) << 16 | rounded(first);
}

// Threads lend each other what they were given, until all have read it.
inline void multiply(float (&sum)[4], const unsigned (&left)[4], const unsigned (&right)[2]) {
  const Given given{left, right};
  const auto all = meet_warp(reinterpret_cast<uint64_t>(&given));
  const auto of = [&](int lane) { return reinterpret_cast<const Given*>(all[lane]); };
  const int lane = own->index % 32;
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    double made = 0;
    for (int k = 0; k < 16; ++k) {
      const int member = k % 8 / 2;
      const unsigned one = of(row % 8 * 4 + member)->left[row / 8 + k / 8 * 2];
      const unsigned other = of(column * 4 + member)->right[k / 8];
      made += k % 2 == 0 ? double(first_of(one)) * first_of(other)
                         : double(second_of(one)) * second_of(other);
    }
    sum[i] = float(double(sum[i]) + made);
  }
  meet_warp(0);
}

}  // namespace emulated::warp_products

namespace wgmma_pipeline {

using namespace emulated;

inline unsigned shared_address(const void*) { return kBase; }
inline void init_barrier(unsigned barrier, int arrivals) {
  if (barrier % 8 != 0) fail("a barrier at an odd place");
  memory_of(own->rank, barrier, 8);
  block().barriers[barrier] = {arrivals, arrivals, 0, 0};
}
inline void publish_barriers() {}
inline void fence_copies() {}
inline void wait(unsigned barrier, unsigned parity) {
  Barrier& of = barrier_of(own->rank, barrier);
  wait_until([&] { return (of.phase & 1) != parity; });
}
inline void expect(unsigned barrier, int bytes) { emulated::arrive(own->rank, barrier, bytes); }
inline void arrive(unsigned barrier) { emulated::arrive(own->rank, barrier); }
inline void arrive_at(unsigned barrier, unsigned rank) { emulated::arrive(rank, barrier); }
inline void load_four(float (&to)[4], unsigned address) {
  if (address % 16 != 0) fail("four numbers at an odd place");
  std::memcpy(to, memory_of(own->rank, address, 16), 16);
}
inline void load_two(float* one, float* other, unsigned address) {
  if (address % 8 != 0) fail("two numbers at an odd place");
  std::memcpy(one, memory_of(own->rank, address, 8), 4);
  std::memcpy(other, memory_of(own->rank, address + 4, 4), 4);
}
inline void store_two(unsigned address, float one, float other) {
  if (address % 8 != 0) fail("two numbers at an odd place");
  std::memcpy(memory_of(own->rank, address, 8), &one, 4);
  std::memcpy(memory_of(own->rank, address + 4, 4), &other, 4);
}
inline void copy_to_all(unsigned target, const Map* map, unsigned barrier, int column, int row,
                        unsigned short ranks) {
  copies.push_back({target, barrier, ranks, *map, column, row});
  ++num_copies;
}
inline void copy(unsigned target, const Map* map, unsigned barrier, int column, int row) {
  copy_to_all(target, map, barrier, column, row, static_cast<unsigned short>(1u << own->rank));
}
inline unsigned cluster_rank() { return own->rank; }
inline void cluster_sync() {
  meet(cluster, int(own->rank * (threads.size() / blocks.size()) + own->index), 0);
}
template <int kThreads> void named_arrive(int barrier) {
  Named& of = block().named[barrier];
  if (++of.arrived == kThreads) of = {0, of.generation + 1};
  ++progress;
}
template <int kThreads> void named_sync(int barrier) {
  Named& of = block().named[barrier];
  const int generation = of.generation;
  named_arrive<kThreads>(barrier);
  wait_until([&] { return of.generation != generation; });
}
template <int kRegisters> void take_registers() {
  const int num_threads = block().all.expected;
  block().registers += kRegisters;
  if (block().registers > 65536 / num_threads / 8 * 8 * num_threads) fail("too many registers");
}
template <int kRegisters> void give_registers() { take_registers<kRegisters>(); }

}  // namespace wgmma_pipeline

using CUtensorMap = emulated::Map;
enum { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 };

namespace wgmma_tensor_map {

inline const char* describe(CUtensorMap* map, int, int element, const void* data, int64_t rows,
                            int64_t columns, int64_t pitch, int box_rows, int box_columns) {
  if ((reinterpret_cast<uintptr_t>(data) | uintptr_t(pitch)) % 16 != 0) return "not aligned";
  *map = {static_cast<const unsigned char*>(data), element, rows, columns, pitch, box_rows,
          box_columns};
  return nullptr;
}

}  // namespace wgmma_tensor_map

// ---- what ring and launch ask of CUDA -------------------------------------------------------

using cudaError_t = int;
enum { cudaSuccess, cudaDevAttrMultiProcessorCount, cudaFuncAttributeMaxDynamicSharedMemorySize };
enum { cudaLaunchAttributeClusterDimension };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct cudaLaunchAttribute { int id; struct { dim3 clusterDim; } val; };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  int dynamicSmemBytes, numAttrs;
  cudaLaunchAttribute* attrs;
};
inline int cudaGetDevice(int*) { return cudaSuccess; }
inline int cudaDeviceGetAttribute(int* found, int, int) { return *found = 3, cudaSuccess; }
template <class Kernel> int cudaFuncSetAttribute(Kernel, int, int bytes) {
  return emulated::kBase + bytes <= emulated::kMemory ? cudaSuccess : 1;
}
template <class Kernel>
int cudaOccupancyMaxActiveClusters(int*, Kernel, cudaLaunchConfig_t*) { return 1; }
inline const char* cudaGetErrorString(int) { return "too much shared memory"; }

inline void await_previous() {}

struct Shape { unsigned blocks; int threads; int smem_bytes; bool is_first = false; };

static int cluster_size = 1;  // of kernels with dynamic shared memory

template <class... Parameters, class... Arguments>
static const char* launch(void (*kernel)(Parameters...), const Shape& shape, void*,
                          Arguments... arguments) {
  gridDim.x = shape.blocks;
  const int num = shape.smem_bytes > 0 ? cluster_size : 1;
  emulated::body = [&] { kernel(static_cast<Parameters>(arguments)...); };
  if (setjmp(emulated::launched) != 0) return emulated::failure;
  for (unsigned first = 0; first < shape.blocks; first += num) {
    emulated::run_cluster(first, num, shape.threads);
  }
  return nullptr;
}
