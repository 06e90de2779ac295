// Rows that are read once: the blocks of a cluster hold one row, a slice each, in shared memory,
// sweep over it there as often as its reductions ask for, and take the next row of their own.
//
// A block's last warp brings, the others compute. Chunks of a slice go to a ring of slots: one
// that the last sweep is through with is requested again at once, for a later chunk of this row or
// of the next. What others of the cluster found of a row comes by their stores to shared memory.
//
// Nothing waits for ever, however many rows and columns there are:
// - Every block takes as many chunks and makes as many exchanges a row as every other one of its
//   cluster. Of an empty slice the chunks are empty, too, and there as soon as they are asked for.
// - A slice has no more chunks than the ring has slots. So the bringing warp only waits for chunks
//   of earlier rows, and the others for chunks that it asks for without waiting for their own row.
// - An exchange is over when each block has told each other one. Two barriers take turns: a block
//   tells of the exchange after the next when all have told of the next, hence are through with
//   this one, what they read of it included.
// - No block reads or writes another one's memory behind the exchange that both waited for, so each
//   may end behind its last one. At the start all wait until all are there.
namespace {{ cluster_space }} {

using namespace cluster_memory;

constexpr int kBlocks = {{ cluster_blocks }};
constexpr int kThreads = {{ cluster_threads }};
constexpr int kConsumers = kThreads - 32;
constexpr int kWarps = kConsumers / 32;
constexpr int kChunkBytes = {{ cluster_chunk }};
constexpr int kChunk = kChunkBytes / 4;  // columns
constexpr int kMostSlots = 64;
constexpr int kRingBytes = 220 * 1024;

struct Fixed {
  uint64_t full[kMostSlots], empty[kMostSlots], told[2];
  double parts[32];            // of the warps
  double totals[2][kBlocks];  // of the blocks, of this exchange and the one before
};
constexpr int kFixedBytes = (int(sizeof(Fixed)) + 127) / 128 * 128;
constexpr int kSharedBytes = kFixedBytes + kRingBytes;

enum class Fold { kSum, kLargest, kSmallest };

template <Fold kFold>
__device__ __forceinline__ double neutral() {
  constexpr double kEnd = __builtin_huge_val();
  return kFold == Fold::kSum ? 0.0 : kFold == Fold::kLargest ? -kEnd : kEnd;
}

// NaN is what NaN is joined with.
template <Fold kFold, class Number>
__device__ __forceinline__ Number joined(Number one, Number other) {
  if (kFold == Fold::kSum) return one + other;
  const bool is_first = kFold == Fold::kLargest ? one > other : one < other;
  return is_first || one != one ? one : other;
}

// Both lanes of a pair join the same two numbers: the order of a sum's two terms is no matter.
template <Fold kFold>
__device__ __forceinline__ double over_warp(double value) {
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) {
    value = joined<kFold>(value, __shfl_xor_sync(0xffffffffu, value, apart));
  }
  return value;
}

// Which of four columns beside each other are there.
struct All {
  __device__ __forceinline__ constexpr bool operator()(int) const { return true; }
};
struct Some {
  int first, count;
  __device__ __forceinline__ bool operator()(int i) const {
    return unsigned(first + i) < unsigned(count);
  }
};

template <class Present>
__device__ __forceinline__ void store(float* place, const float (&values)[4], Present present) {
  const bool is_aligned = (reinterpret_cast<uintptr_t>(place) & 15) == 0;
  if (present(0) && present(3) && is_aligned) {
    __stcs(reinterpret_cast<float4*>(place),
           make_float4(values[0], values[1], values[2], values[3]));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (present(i)) __stcs(place + i, values[i]);
  }
}

// Columns of a row in a chunk.
struct Piece {
  int first, count;
};

// The tensors whose rows are brought.
template <int kTensors>
struct Sources {
  const float* from[kTensors];
};

// A block's share of the rows of its cluster.
template <int kTensors, int kColumns>
struct Block {
  static constexpr int kSlice = (kColumns + 32 * kBlocks - 1) / (32 * kBlocks) * 32;
  static constexpr int kChunks = (kSlice + kChunk - 1) / kChunk;
  static constexpr int kBuffer = kChunkBytes + 16;  // a chunk may begin between multiples of 16
  static constexpr int kSlotBytes = kTensors * kBuffer;
  static constexpr int kFitting = kRingBytes / kSlotBytes;
  static constexpr int kSlots = kFitting < kMostSlots ? kFitting : kMostSlots;
  static_assert(kChunks <= kSlots, "a block holds its slice");

  const Sources<kTensors> sources;
  const int64_t rows;
  const int64_t clusters = gridDim.x / kBlocks;
  const unsigned own = rank();
  Fixed& fixed = *reinterpret_cast<Fixed*>(shared());
  char* const ring = shared() + kFixedBytes;
  int slot = 0;  // of the row's first chunk, and which time it is filled
  unsigned parity = 0;
  unsigned exchanges = 0;

  __device__ __forceinline__ Block(const Sources<kTensors>& sources, int64_t rows)
      : sources(sources), rows(rows) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kSlots; ++i) {
        init(&fixed.full[i], 1);
        init(&fixed.empty[i], kWarps);
      }
      init(&fixed.told[0], kBlocks);
      init(&fixed.told[1], kBlocks);
      publish_barriers();
    }
    sync_cluster();
  }

  __device__ __forceinline__ bool is_bringing() const { return threadIdx.x >= kConsumers; }

  __device__ __forceinline__ int64_t first_row() const { return blockIdx.x / kBlocks; }

  __device__ __forceinline__ Piece piece(int chunk) const {
    const int first = int(own) * kSlice + chunk * kChunk;
    const int end = min(min(first + kChunk, int(own + 1) * kSlice), kColumns);
    return {first, max(end - first, 0)};
  }

  __device__ __forceinline__ const float* place(int tensor, int64_t row, int column) const {
    return sources.from[tensor] + row * kColumns + column;
  }

  static __device__ __forceinline__ int off(const float* place) {  // in floats, of its 16 bytes
    return int(reinterpret_cast<uintptr_t>(place) & 15) / 4;
  }

  static __device__ __forceinline__ void advance(int& slot, unsigned& parity, int by) {
    slot += by;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }

  // Brings all chunks of all rows; of the last warp, the first lane.
  __device__ __forceinline__ void bring() {
    if (threadIdx.x != kConsumers) return;
    bool has_stored = false;
#pragma unroll 1
    for (int64_t row = first_row(); row < rows; row += clusters) {
#pragma unroll 1
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        wait(&fixed.empty[slot], parity ^ 1);
        if (has_stored) fence_copies();
        has_stored |= bring_chunk(row, piece(chunk));
        advance(slot, parity, 1);
      }
    }
  }

  // Copies what lies in whole multiples of 16 bytes of a tensor, with what is in them of its other
  // columns and rows; at a tensor's ends a few floats are left, which it stores. Says whether.
  __device__ __forceinline__ bool bring_chunk(int64_t row, const Piece& piece) {
    uintptr_t begin[kTensors], end[kTensors];
    int bytes = 0;
    bool has_stored = false;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      const uintptr_t first = reinterpret_cast<uintptr_t>(place(t, row, piece.first));
      const uintptr_t past = first + 4 * uintptr_t(piece.count);
      const uintptr_t whole = reinterpret_cast<uintptr_t>(place(t, 0, 0));
      const uintptr_t all = reinterpret_cast<uintptr_t>(place(t, rows, 0));
      begin[t] = max(first / 16 * 16, (whole + 15) / 16 * 16);
      end[t] = min((past + 15) / 16 * 16, all / 16 * 16);
      if (piece.count == 0 || end[t] < begin[t]) end[t] = begin[t];
      bytes += int(end[t] - begin[t]);
      char* const buffer = ring + slot * kSlotBytes + t * kBuffer;
      const bool has_none = end[t] == begin[t];
      for (uintptr_t at = first; at < past && (has_none || at < begin[t]); at += 4) {
        store_one(buffer, first, at);
        has_stored = true;
      }
      for (uintptr_t at = max(first, end[t]); at < past && !has_none; at += 4) {
        store_one(buffer, first, at);
        has_stored = true;
      }
    }
    expect(&fixed.full[slot], bytes);
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      const uintptr_t first = reinterpret_cast<uintptr_t>(place(t, row, piece.first));
      char* const buffer = ring + slot * kSlotBytes + t * kBuffer;
      if (end[t] == begin[t]) continue;
      copy(buffer + (begin[t] - first / 16 * 16), reinterpret_cast<const void*>(begin[t]),
           int(end[t] - begin[t]), &fixed.full[slot]);
    }
    return has_stored;
  }

  static __device__ __forceinline__ void store_one(char* buffer, uintptr_t first, uintptr_t at) {
    *reinterpret_cast<float*>(buffer + (at - first / 16 * 16)) =
        *reinterpret_cast<const float*>(at);
  }

  // Goes over the slice: `take` gets four columns of each tensor, the first one's number, and which
  // of them are there. The first sweep over a row waits for its chunks, the last one gives them up.
  template <bool kIsFirst, bool kIsLast, class Take>
  __device__ __forceinline__ void sweep(int64_t row, Take take) {
    int slot = this->slot;
    unsigned parity = this->parity;
#pragma unroll 1
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if (kIsFirst) wait(&fixed.full[slot], parity);
      const Piece piece = this->piece(chunk);
      const char* const buffer = ring + slot * kSlotBytes;
      int offs[kTensors];
#pragma unroll
      for (int t = 0; t < kTensors; ++t) offs[t] = off(place(t, row, piece.first));
      const int groups = piece.count > 0 ? (offs[0] + piece.count + 3) / 4 : 0;
      // Warps begin in turns, so that all are as often the one that takes what is left.
      const int turn = (int(threadIdx.x) / 32 + chunk) % kWarps * 32 + int(threadIdx.x) % 32;
#pragma unroll 1
      for (int group = turn; group < groups; group += kConsumers) {
        const int first = 4 * group - offs[0];
        float x[kTensors][4];
        if (first >= 0 && first + 4 <= piece.count) {
          load(x, buffer, offs, first, All{});
          take(x, piece.first + first, All{});
        } else {
          const Some some{first, piece.count};
          load(x, buffer, offs, first, some);
          take(x, piece.first + first, some);
        }
      }
      if (kIsLast) {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive(&fixed.empty[slot]);
      }
      advance(slot, parity, 1);
    }
    if (kIsLast) advance(this->slot, this->parity, kChunks);
  }

  template <class Present>
  static __device__ __forceinline__ void load(float (&x)[kTensors][4], const char* buffer,
                                              const int (&offs)[kTensors], int first,
                                              Present present) {
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      const float* const from = reinterpret_cast<const float*>(buffer + t * kBuffer);
      const int at = first + offs[t];
      if (present(0) && present(3) && at % 4 == 0) {
        const float4 four = *reinterpret_cast<const float4*>(from + at);
        x[t][0] = four.x;
        x[t][1] = four.y;
        x[t][2] = four.z;
        x[t][3] = four.w;
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) x[t][i] = present(i) ? from[at + i] : 0.0f;
      }
    }
  }

  // What all consumers of all blocks of the cluster hold, joined in one order: of lanes, warps,
  // blocks. By all consumers of all blocks.
  template <Fold kFold>
  __device__ __forceinline__ double together(double value) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, which = exchanges % 2;
    value = over_warp<kFold>(value);
    if (lane == 0) fixed.parts[warp] = value;
    sync_some<kConsumers>();
    if (warp == 0) {
      value = over_warp<kFold>(lane < kWarps ? fixed.parts[lane] : neutral<kFold>());
      if (lane < kBlocks) {
        store_at(&fixed.totals[which][own], lane, value);
        tell(&fixed.told[which], lane);
      }
    }
    wait_for_cluster(&fixed.told[which], exchanges / 2 % 2);
    ++exchanges;
    value = fixed.totals[which][0];
#pragma unroll
    for (int block = 1; block < kBlocks; ++block) {
      value = joined<kFold>(value, fixed.totals[which][block]);
    }
    return value;
  }
};

}  // namespace {{ cluster_space }}
