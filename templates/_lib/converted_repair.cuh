// What rows of x or of the weight give that float16 cannot have, computed behind the product: rows
// of x whose unit is NaN, and marked rows of the weight. A block that finds none of either, or is
// told so, ends at once. Each float32 number is three bfloat16 ones, of eight bits each, of whose
// nine products those are made that are not below 2^-26 of the largest. Where numbers are so small
// or so large that parts or products may not be what they are of others, all nine are made of parts
// that are, the second times 2^8 and the third times 2^16.
namespace converted {

{% include "_lib/warp_products.cuh" %}

constexpr int kRepairers = 256;  // threads of a block
constexpr int kRepairSide = 64;  // rows of either operand in a tile
constexpr int kRepairDepth = 32;  // numbers of a short sum
constexpr int kRepairPitch = kRepairDepth + 8;  // of a row in shared memory: no two in one bank
constexpr int kRepairEach = kRepairSide * kRepairDepth / kRepairers;  // numbers of a thread
constexpr int kLookedAt = 8;  // rows that a thread looks at in one go

struct Operand {  // numbers between one batch, row or term of a sum and the next
  const float* from;
  int64_t batch, row, column;
};

struct Repair {
  Operand x, weight;
  const float* bias;  // may be null
  const float* x_unit;
  const int* marks;  // of the weight's rows
  const int* odd;    // whether there is anything to do; null where that is not known
  int* found;        // where it is not, set if there is
  float* out;
  int64_t rows, columns;  // of a batch
  int64_t depth, all_depth;  // of a batch's sums, and of all where batches are pieces of sums
  Batches batches;        // of the weight, left, and of x
};

template <bool kOfX>
__device__ __forceinline__ bool is_odd(const Repair& of, int64_t batch, int64_t row) {
  if constexpr (kOfX) return isnan(__ldcg(of.x_unit + batch * of.batches.right_rows + row));
  return __ldcg(of.marks + batch * of.batches.left_rows + row) != 0;
}

// Rows of an operand in shared memory: for each of three parts, pairs of bfloat16 numbers.
struct RepairParts {
  alignas(16) unsigned pairs[3][kRepairSide][kRepairPitch / 2];
};

struct RepairTile {  // of a block
  int list[kRepairSide];  // of the tile's own rows
  int counts[kLookedAt][kRepairers / 32];
};

// How many rows are odd. Those from number `first` on are listed, and -1 where there are no more.
template <bool kOfX>
__device__ __forceinline__ int list_odd(const Repair& of, int64_t batch, int first,
                                        RepairTile& tile) {
  constexpr int kWarps = kRepairers / 32;
  const int64_t num_rows = kOfX ? of.rows : of.columns;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x < kRepairSide) tile.list[threadIdx.x] = -1;
  int found = 0;
  for (int64_t begin = 0; begin < num_rows; begin += kRepairers * kLookedAt) {
    unsigned votes[kLookedAt];
#pragma unroll
    for (int j = 0; j < kLookedAt; ++j) {
      const int64_t row = begin + j * kRepairers + threadIdx.x;
      votes[j] = __ballot_sync(~0u, row < num_rows && is_odd<kOfX>(of, batch, row));
    }
    if (lane == 0) {
#pragma unroll
      for (int j = 0; j < kLookedAt; ++j) tile.counts[j][warp] = __popc(votes[j]);
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kLookedAt; ++j) {
      int place = found + __popc(votes[j] & ((1u << lane) - 1)) - first;
      for (unsigned w = 0; w < kWarps; ++w) {
        if (w < warp) place += tile.counts[j][w];
        found += tile.counts[j][w];
      }
      if ((votes[j] >> lane & 1) != 0 && place >= 0 && place < kRepairSide) {
        tile.list[place] = static_cast<int>(begin + j * kRepairers + threadIdx.x);
      }
    }
    __syncthreads();
  }
  return found;
}

// Which of a tile's rows, and which of its terms, are a thread's: those beside each other in memory
// are of threads beside each other.
struct RowTerms {
  int row, first;
  __device__ explicit RowTerms(const Operand& from) {
    constexpr int kPieces = kRepairDepth / kRepairEach;
    const bool is_along = from.column == 1;
    row = is_along ? threadIdx.x / kPieces : threadIdx.x % kRepairSide;
    first = (is_along ? threadIdx.x % kPieces : threadIdx.x / kRepairSide) * kRepairEach;
  }
};

// Its numbers of a row from term `k` on; zeros where there are none, and of row -1.
__device__ __forceinline__ void fetch_terms(float (&to)[kRepairEach], const Operand& from,
                                            int64_t batch, int64_t row, int k, int depth) {
  const float* begin = from.from + batch * from.batch + row * from.row;
  const bool is_aligned = from.column == 1 && reinterpret_cast<uintptr_t>(begin) % 16 == 0;
#pragma unroll
  for (int j = 0; j < kRepairEach; j += 4) {
    if (row >= 0 && is_aligned && k + j + 4 <= depth) {
      const float4 four = __ldg(reinterpret_cast<const float4*>(begin + k + j));
      to[j] = four.x, to[j + 1] = four.y, to[j + 2] = four.z, to[j + 3] = four.w;
      continue;
    }
#pragma unroll
    for (int i = j; i < j + 4; ++i) {
      to[i] = row >= 0 && k + i < depth ? __ldg(begin + (k + i) * from.column) : 0.0f;
    }
  }
}

// The number of eight bits that is next to a finite one; none is beyond bfloat16.
__device__ __forceinline__ float eight_bits_of(float number) {
  const unsigned bits = __float_as_uint(number);
  const unsigned size = min((bits & 0x7fffffffu) + 0x8000u, 0x7f7fffffu);
  return __uint_as_float((bits & 0x80000000u) | (size & 0x7fff0000u));
}

// An Inf or a NaN is in the last part, and 1 in its place elsewhere: times 0 it would be NaN.
__device__ __forceinline__ void split_in_three(float number, float (&parts)[3]) {
  const bool is_finite = fabsf(number) < INFINITY;
  const float whole = is_finite ? number : number > 0.0f ? 1.0f : -1.0f;
  parts[0] = eight_bits_of(whole);
  const float rest = (whole - parts[0]) * 256.0f;
  parts[1] = eight_bits_of(rest);
  const float low = eight_bits_of((rest - parts[1]) * 256.0f);
  parts[2] = is_finite ? low : isnan(number) ? __uint_as_float(0x7fc00000u) : number;
}

// A pair of numbers as pairs of parts, where none is unusual.
__device__ __forceinline__ void split_usual(float first, float second, unsigned (&pairs)[3]) {
  using namespace warp_products;
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    pairs[p] = pair_of(first, second);
    first -= first_of(pairs[p]);
    second -= second_of(pairs[p]);
  }
}

__device__ __forceinline__ void split_any(float first, float second, unsigned (&pairs)[3]) {
  float one[3], other[3];
  split_in_three(first, one);
  split_in_three(second, other);
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    pairs[p] = __float_as_uint(one[p]) >> 16 | (__float_as_uint(other[p]) & 0xffff0000u);
  }
}

template <bool kIsUsual>
__device__ __forceinline__ void put_parts(RepairParts& into, const float (&numbers)[kRepairEach],
                                          const RowTerms& at) {
  static_assert(kRepairEach == 8, "four pairs are stored at once");
  unsigned pairs[4][3];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    (kIsUsual ? split_usual : split_any)(numbers[2 * j], numbers[2 * j + 1], pairs[j]);
  }
#pragma unroll
  for (int p = 0; p < 3; ++p) {
    *reinterpret_cast<uint4*>(&into.pairs[p][at.row][at.first / 2]) =
        make_uint4(pairs[0][p], pairs[1][p], pairs[2][p], pairs[3][p]);
  }
}

// Whether one is below 2^-100, but not 0, or 2^60 or above, or NaN.
__device__ __forceinline__ bool is_any_unusual(const float (&numbers)[kRepairEach]) {
  bool is_any = false;
#pragma unroll
  for (float number : numbers) {
    const float size = fabsf(number);
    is_any |= (size != 0.0f) & !((size >= 0x1p-100f) & (size < 0x1p60f));
  }
  return is_any;
}

// Of a warp: 16 rows of the tile's own, and 32 of the others.
struct RepairSums {
  static constexpr int kTiles = 4;  // of eight of the others
  float numbers[kTiles][4] = {};

  static __device__ int own(int i) {
    return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + i / 2 * 8;
  }
  static __device__ int other(int tile, int i) {
    return threadIdx.x / 128 * 32 + tile * 8 + threadIdx.x % 4 * 2 + i % 2;
  }

  // Calls `multiply` with parts of pairs of terms, for each eight of the others.
  template <class Multiply>
  static __device__ __forceinline__ void each_step(const RepairParts& owns,
                                                   const RepairParts& others,
                                                   const Multiply& multiply) {
    const unsigned member = threadIdx.x % 4;
#pragma unroll
    for (unsigned k = member; k < kRepairDepth / 2; k += 8) {
      unsigned left[3][4];
#pragma unroll
      for (int p = 0; p < 3; ++p) {
#pragma unroll
        for (int r = 0; r < 4; ++r) left[p][r] = owns.pairs[p][own(2 * (r % 2))][k + r / 2 * 4];
      }
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const unsigned row = threadIdx.x / 128 * 32 + tile * 8 + threadIdx.x % 32 / 4;
        unsigned right[3][2];
#pragma unroll
        for (int p = 0; p < 3; ++p) {
#pragma unroll
          for (int r = 0; r < 2; ++r) right[p][r] = others.pairs[p][row][k + r * 4];
        }
        multiply(tile, left, right);
      }
    }
  }

  // What a short sum gives; the smaller products apart, since tensor cores truncate.
  __device__ __forceinline__ void add_usual(const RepairParts& owns, const RepairParts& others) {
    using warp_products::multiply;
    float large[kTiles][4] = {}, rest[kTiles][4] = {};
    each_step(owns, others, [&](int tile, const auto& left, const auto& right) {
      multiply(rest[tile], left[2], right[0]);
      multiply(large[tile], left[0], right[0]);
      multiply(rest[tile], left[0], right[2]);
      multiply(rest[tile], left[1], right[1]);
      multiply(rest[tile], left[1], right[0]);
      multiply(rest[tile], left[0], right[1]);
    });
    each_sum([&](int tile, int i) { numbers[tile][i] += large[tile][i] + rest[tile][i]; });
  }

  // The same of parts that are scaled.
  __device__ __forceinline__ void add_any(const RepairParts& owns, const RepairParts& others) {
    using warp_products::multiply;
    float sums[kTiles][4] = {}, least[kTiles][4] = {};
    each_step(owns, others, [&](int tile, const auto& left, const auto& right) {
      multiply(sums[tile], left[1], right[2]);
      multiply(sums[tile], left[2], right[1]);
      multiply(least[tile], left[2], right[2]);
    });
    each_sum([&](int tile, int i) {
      // Of an Inf or a NaN it is NaN, and they are in other products.
      const float small = (least[tile][i] * 0x1p-8f + sums[tile][i]) * 0x1p-8f;
      least[tile][i] = fabsf(small) < INFINITY ? small : 0.0f;
      sums[tile][i] = 0.0f;
    });
    each_step(owns, others, [&](int tile, const auto& left, const auto& right) {
      multiply(least[tile], left[2], right[0]);
      multiply(least[tile], left[0], right[2]);
      multiply(least[tile], left[1], right[1]);
      multiply(sums[tile], left[1], right[0]);
      multiply(sums[tile], left[0], right[1]);
    });
    each_sum([&](int tile, int i) {
      least[tile][i] = (least[tile][i] * 0x1p-8f + sums[tile][i]) * 0x1p-8f;
      sums[tile][i] = 0.0f;
    });
    each_step(owns, others, [&](int tile, const auto& left, const auto& right) {
      multiply(sums[tile], left[0], right[0]);
    });
    each_sum([&](int tile, int i) {
      // Parts of one number may have two signs: where it is beyond float32, so would they be.
      const bool is_beyond = fabsf(sums[tile][i]) == INFINITY;
      numbers[tile][i] += is_beyond ? sums[tile][i] : sums[tile][i] + least[tile][i];
    });
  }

  template <class Each>
  static __device__ __forceinline__ void each_sum(const Each& each) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4; ++i) each(tile, i);
    }
  }
};

// A tile's sums of products, of rows that each thread fetches its share of; -1 is no row. One text
// of machine code for all kernels of a source: it takes most of the time to compile these.
__device__ __noinline__ void repair_sums(RepairSums& made, const Operand own, const Operand other,
                                         int64_t batch, int64_t own_row, int64_t other_row,
                                         int depth) {
  __shared__ RepairParts owns, others;
  const RowTerms own_at(own), other_at(other);
  float own_next[kRepairEach], other_next[kRepairEach];
  fetch_terms(own_next, own, batch, own_row, own_at.first, depth);
  fetch_terms(other_next, other, batch, other_row, other_at.first, depth);
  RepairSums sums;
  for (int k = 0; k < depth; k += kRepairDepth) {
    put_parts<true>(owns, own_next, own_at);
    put_parts<true>(others, other_next, other_at);
    const bool is_unusual =
        __syncthreads_or(is_any_unusual(own_next) || is_any_unusual(other_next));
    if (is_unusual) {
      put_parts<false>(owns, own_next, own_at);
      put_parts<false>(others, other_next, other_at);
      __syncthreads();
    }
    if (const int next = k + kRepairDepth; next < depth) {
      fetch_terms(own_next, own, batch, own_row, next + own_at.first, depth);
      fetch_terms(other_next, other, batch, other_row, next + other_at.first, depth);
    }
    if (is_unusual) {
      sums.add_any(owns, others);
    } else {
      sums.add_usual(owns, others);
    }
    __syncthreads();
  }
  made = sums;
}

// What odd rows of one operand give with all of the other; of the weight, not with x's odd ones,
// which give it themselves. Blocks take turns, of which this is number `turn` of so many.
template <bool kOfX, class Epilogue>
__device__ __forceinline__ void repair_rows(const Repair& of, const Epilogue& epilogue,
                                            int64_t batch, int64_t turn, int64_t turns,
                                            RepairTile& shared) {
  const int num_found = list_odd<kOfX>(of, batch, 0, shared);
  const Operand& operand = kOfX ? of.x : of.weight;
  const Operand& beside = kOfX ? of.weight : of.x;
  const int64_t num_others = kOfX ? of.columns : of.rows;
  const int depth = static_cast<int>(min(of.depth, of.all_depth - batch * of.depth));
  const int64_t across = (num_others + kRepairSide - 1) / kRepairSide;
  const int64_t tiles = (num_found + kRepairSide - 1) / kRepairSide * across;
  for (int64_t tile = turn; tile < tiles; tile += turns) {
    __syncthreads();
    list_odd<kOfX>(of, batch, static_cast<int>(tile / across) * kRepairSide, shared);
    const int64_t first = tile % across * kRepairSide;
    unsigned wants = 0;  // a bit for each of a thread's sums
#pragma unroll
    for (int j = 0; j < 4 * RepairSums::kTiles; ++j) {
      const int64_t own = shared.list[RepairSums::own(j % 4)];
      const int64_t other = first + RepairSums::other(j / 4, j % 4);
      if (own < 0 || other >= num_others) continue;
      if (!kOfX && is_odd<true>(of, batch, other)) continue;
      // Of what no epilogue reads there may be no mark.
      const int64_t row = kOfX ? own : other, column = kOfX ? other : own;
      if (epilogue.reads(batch * of.rows + row, column, of.columns)) wants |= 1u << j;
    }
    if (!__syncthreads_or(wants != 0)) continue;

    const int64_t own_row = shared.list[RowTerms(operand).row];
    const int64_t other_row = first + RowTerms(beside).row;
    RepairSums sums;
    repair_sums(sums, operand, beside, batch, own_row, other_row < num_others ? other_row : -1,
                depth);
#pragma unroll
    for (int j = 0; j < 4 * RepairSums::kTiles; ++j) {
      if ((wants >> j & 1) == 0) continue;
      const int64_t own = shared.list[RepairSums::own(j % 4)];
      const int64_t other = first + RepairSums::other(j / 4, j % 4);
      const int64_t column = kOfX ? other : own;
      const int64_t made = batch * of.rows + (kOfX ? own : other);
      const float bias = of.bias == nullptr ? 0.0f : __ldg(of.bias + column);
      of.out[made * of.columns + column] =
          epilogue(sums.numbers[j / 4][j % 4] + bias, made, column, of.columns);
    }
  }
}

template <class Epilogue>
__global__ void __launch_bounds__(kRepairers)
    repair_kernel(const Repair of, const Epilogue epilogue) {
  await_previous();
  if (of.odd == nullptr) {  // of one batch
    int found = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < of.columns; i += kRepairers) found |= __ldcg(of.marks + i);
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < of.rows; i += kRepairers) {
      found |= isnan(__ldcg(of.x_unit + i)) ? 1 : 0;
    }
    if (!__syncthreads_or(found)) return;
    if (threadIdx.x == 0) *of.found = 1;
  } else if (__ldcg(of.odd) == 0) {
    return;
  }
  __shared__ RepairTile shared;
  // Blocks share a batch where there are more of them than batches.
  const int64_t turns = max(int64_t{1}, gridDim.x / of.batches.count), teams = gridDim.x / turns;
  if (blockIdx.x >= turns * teams) return;
  for (int64_t batch = blockIdx.x / turns; batch < of.batches.count; batch += teams) {
    repair_rows<true>(of, epilogue, batch, blockIdx.x % turns, turns, shared);
    __syncthreads();
    repair_rows<false>(of, epilogue, batch, blockIdx.x % turns, turns, shared);
    __syncthreads();
  }
}

}  // namespace converted
