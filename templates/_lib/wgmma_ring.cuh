// What the Hopper templates share of a persistent, warp-specialised GEMM: its warpgroups, the ring of
// stages in shared memory, which tiles a block computes, and tiles copied by a cluster together.
//
// A cluster has kClusterM x kClusterN blocks. Those with the same rows of the left operand, and
// those with the same rows of the right one, copy a share each and send it to all of them.
// Expects wgmma_pipeline.cuh before it, and kStages, kClusterM, kClusterN, kRasterRows, kBlockM,
// kBlockN, kConsumers, kMinBlocks (of a multiprocessor) and kProducerRegisters (of a thread).

// One warpgroup copies, and perhaps prepares; what registers it gives away the others share.
constexpr int kThreads = 128 * (kConsumers + 1);
constexpr int kConsumerWarps = 4 * kConsumers;
constexpr int kLaunchRegisters = 65536 / (kThreads * kMinBlocks) / 8 * 8;
constexpr int kFreeRegisters =
    (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
constexpr int kConsumerRegisters = kFreeRegisters < 240 ? kFreeRegisters : 240;

constexpr int kCluster = kClusterM * kClusterN;
constexpr int kSenders = kClusterM + kClusterN - 1;  // blocks that copy into one block

struct Ring {  // the stage at hand, and how often the ring was walked round
  int stage = 0;
  unsigned parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ __forceinline__ void sync_all() {
  if constexpr (kCluster > 1) {
    wgmma_pipeline::cluster_sync();
  } else {
    __syncthreads();
  }
}

// Addresses in shared memory.
struct Pipeline {
  unsigned stages;
  unsigned beside;  // them: what others keep there
  unsigned full;   // [kStages] barriers: the copies have arrived
  unsigned empty;  // [kStages] barriers: every consumer that reads these copies has done so

  // From a kernel's dynamic shared memory.
  __device__ __forceinline__ Pipeline(const void* shared, int stage_bytes, int bytes_beside = 0) {
    stages = (wgmma_pipeline::shared_address(shared) + 1023) / 1024 * 1024;
    beside = stages + kStages * stage_bytes;
    full = beside + bytes_beside;
    empty = full + 8 * kStages;
  }

  // By all threads.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; ++stage) {
        wgmma_pipeline::init_barrier(full + 8 * stage, 1);
        wgmma_pipeline::init_barrier(empty + 8 * stage, kConsumerWarps * kSenders);
      }
      wgmma_pipeline::publish_barriers();
    }
    sync_all();
  }

  struct Stage {
    unsigned memory, barrier;
  };

  // By the copying thread: the next stage, once it is free, for copies of `stage_bytes` in all.
  __device__ __forceinline__ Stage free_stage(const Ring& ring, int stage_bytes) const {
    const unsigned barrier = full + 8 * ring.stage;
    const unsigned memory = stages + ring.stage * stage_bytes;
    wgmma_pipeline::wait(empty + 8 * ring.stage, ring.parity ^ 1);
    wgmma_pipeline::expect(barrier, stage_bytes);
    return {memory, barrier};
  }
};

__device__ __forceinline__ void leave_cluster() {
  if constexpr (kCluster > 1) {  // no block leaves while another may still write to it
    __syncwarp();
    wgmma_pipeline::cluster_sync();
  }
}

// What the first warpgroup does, and what the others do, each with its share of the registers.
template <class Produce, class Consume>
__device__ __forceinline__ void by_warpgroups(const Produce& produce, const Consume& consume) {
  if (threadIdx.x < 128) {
    wgmma_pipeline::give_registers<kProducerRegisters>();
    produce();
  } else {
    wgmma_pipeline::take_registers<kConsumerRegisters>();
    consume();
  }
  leave_cluster();
}

struct Schedule {  // of this block's tiles
  int64_t row_tiles, column_tiles;  // of clusters
  int64_t first, step;
  unsigned rank;  // in the cluster

  __device__ __forceinline__ Schedule(int64_t rows, int64_t columns) {
    row_tiles = (rows + kClusterM * kBlockM - 1) / (kClusterM * kBlockM);
    column_tiles = (columns + kClusterN * kBlockN - 1) / (kClusterN * kBlockN);
    first = blockIdx.x / kCluster;
    step = gridDim.x / kCluster;
    rank = kCluster == 1 ? 0 : wgmma_pipeline::cluster_rank();
  }

  __device__ __forceinline__ int64_t end() const { return row_tiles * column_tiles; }
  __device__ __forceinline__ unsigned row_rank() const { return rank % kClusterM; }
  __device__ __forceinline__ unsigned column_rank() const { return rank / kClusterM; }

  __device__ __forceinline__ void place(int64_t tile, int64_t* row_tile,
                                        int64_t* column_tile) const {
    const int64_t rows_at_once = kRasterRows == 0 ? row_tiles : kRasterRows;
    const int64_t first_row = tile / (rows_at_once * column_tiles) * rows_at_once;
    const int64_t rows_here = min(rows_at_once, row_tiles - first_row);
    const int64_t place_here = tile % (rows_at_once * column_tiles);
    *row_tile = (first_row + place_here % rows_here) * kClusterM + row_rank();
    *column_tile = place_here / rows_here * kClusterN + column_rank();
  }

  // Blocks of the cluster that have the same rows (or columns) as this one, as bits.
  __device__ __forceinline__ unsigned short same_rows() const {
    unsigned blocks = 0;
#pragma unroll
    for (int i = 0; i < kClusterN; ++i) blocks |= 1u << row_rank() << i * kClusterM;
    return static_cast<unsigned short>(blocks);
  }
  __device__ __forceinline__ unsigned short same_columns() const {
    return static_cast<unsigned short>(((1u << kClusterM) - 1) << column_rank() * kClusterM);
  }
};

// The tile of kRows rows from `row` on, in boxes of kBoxColumns elements (kBoxBytes bytes), each
// box kRows rows in shared memory. kShared `blocks` of the cluster copy a share of the rows each.
template <int kRows, int kShared, int kBoxes, int kBoxBytes, int kBoxColumns>
__device__ __forceinline__ void copy_boxes(unsigned target, const CUtensorMap* map,
                                           unsigned barrier, int column, int row, unsigned share,
                                           unsigned short blocks) {
  constexpr int kShare = kRows / kShared;
#pragma unroll
  for (int box = 0; box < kBoxes; ++box) {
    const unsigned to = target + (box * kRows + share * kShare) * kBoxBytes;
    const int from_row = row + static_cast<int>(share) * kShare;
    const int from_column = column + box * kBoxColumns;
    if constexpr (kShared == 1) {
      wgmma_pipeline::copy(to, map, barrier, from_column, from_row);
    } else {
      wgmma_pipeline::copy_to_all(to, map, barrier, from_column, from_row, blocks);
    }
  }
}

// Tells every block that copies into this stage that this warp has read it: those with the same
// rows of the left operand, and those with the same rows of the right one.
__device__ __forceinline__ void release(const Pipeline& pipeline, int stage) {
  const unsigned lane = threadIdx.x % 32;
  const unsigned barrier = pipeline.empty + 8 * stage;
  if constexpr (kCluster == 1) {
    if (lane == 0) wgmma_pipeline::arrive(barrier);
  } else if (lane < kSenders) {
    const unsigned rank = wgmma_pipeline::cluster_rank();
    const unsigned row_rank = rank % kClusterM;
    const unsigned column_rank = rank / kClusterM;
    const unsigned other = lane - kClusterM;  // the place among the other blocks of this row
    wgmma_pipeline::arrive_at(
        barrier, lane < kClusterM
                     ? column_rank * kClusterM + lane
                     : (other + (other >= column_rank ? 1 : 0)) * kClusterM + row_rank);
  }
}

struct Grid {
  unsigned blocks;
  const char* message;  // null, or why it is not known
};

// A persistent grid for all tiles of [rows, columns], `batches` times.
template <class Kernel>
Grid persistent_grid(Kernel kernel, int64_t rows, int64_t columns, int smem_bytes,
                     int64_t batches = 1) {
  const int64_t row_tiles = (rows + kClusterM * kBlockM - 1) / (kClusterM * kBlockM);
  const int64_t column_tiles = (columns + kClusterN * kBlockN - 1) / (kClusterN * kBlockN);
  const int64_t tiles = batches * row_tiles * column_tiles;
  int device = 0;
  int num_sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  }
  int64_t places = int64_t{num_sms} * kMinBlocks / kCluster;
  if (error == cudaSuccess && kCluster > 2) {  // some multiprocessors may be left over
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = kCluster;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(kCluster);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = smem_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    int most = 0;
    error = cudaOccupancyMaxActiveClusters(&most, kernel, &config);
    places = most < places ? most : places;
  }
  if (error != cudaSuccess) return {0, cudaGetErrorString(error)};
  return {unsigned((tiles < places ? tiles : places) * kCluster), nullptr};
}
