// The end of a tile of wgmma_gemm.cuh: what its sums become in y, and moments of its columns.

// Where a thread's sums are: row 16 * warp + group (+ 8), columns 8 * j + 2 * member (+ 1).
struct Place {
  int consumer, warp, group, member;
};

__device__ __forceinline__ Place place() {
  const int thread = threadIdx.x - 128;
  return {thread / 128, thread / 32 % 4, thread % 32 / 4, thread % 4};
}

// The first of the rows that a warp has in its row tile `i`.
__device__ __forceinline__ int first_row_of(int consumer, int warp, int i) {
  return (consumer * kRowTiles + i) * 64 + 16 * warp;
}

__device__ __forceinline__ int rows_inside(int first, int count, int num_rows) {
  return max(0, min(num_rows - first, count));
}

// 1 / scale, for a power of two.
__device__ __forceinline__ float inverse_of(float scale) {
  if constexpr (kHoldsInverses) return scale;
  return __int_as_float((254 << 23) - __float_as_int(scale));
}

__device__ __forceinline__ float scale_at(const float* __restrict__ scales, int place, int end) {
  return place < end ? __ldcg(scales + place) : 1.0f;  // from L2: see prepare: behind
}

// Merges the moments of columns with those of the lane whose number differs in kMask; of
// 2 * kHalf columns each lane keeps one half, the upper one where its bit is set. Both lanes have
// `count` rows if kIsFull.
template <bool kIsFull, int kHalf, int kMask>
__device__ __forceinline__ void merge_half(float* mean, float* m2, float& count) {
  const bool is_upper = (threadIdx.x & kMask) != 0;
  const float other = kIsFull ? count : __shfl_xor_sync(0xffffffffu, count, kMask);
  const float share = kIsFull ? 0.5f : count + other > 0.0f ? other / (count + other) : 0.0f;
  const float weight = count * share;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float given_mean = is_upper ? mean[i] : mean[kHalf + i];
    const float given_m2 = is_upper ? m2[i] : m2[kHalf + i];
    const float kept_mean = is_upper ? mean[kHalf + i] : mean[i];
    const float kept_m2 = is_upper ? m2[kHalf + i] : m2[i];
    const float delta = __shfl_xor_sync(0xffffffffu, given_mean, kMask) - kept_mean;
    mean[i] = kept_mean + delta * share;
    m2[i] = kept_m2 + __shfl_xor_sync(0xffffffffu, given_m2, kMask) + delta * delta * weight;
  }
  count += other;
}

// A thread's rows of a tile: the scales they were brought into range with, and where they go.
struct Rows {
  float scale[2 * kRowTiles];
  bool is_inside[2 * kRowTiles];
  float* line[2 * kRowTiles];
  bool is_plain;  // no product of a sum with one row's factor leaves float32's range
};

__device__ __forceinline__ Rows rows_of_thread(float* __restrict__ y, int64_t stride,
                                               const float* __restrict__ row_scale,
                                               int num_rows) {
  const Place at = place();
  Rows rows;
  rows.is_plain = true;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = first_row_of(at.consumer, at.warp, i / 2) + at.group + i % 2 * 8;
    rows.is_inside[i] = row < num_rows;
    rows.line[i] = y + row * stride;
    if constexpr (kScales) {
      rows.scale[i] = scale_at(row_scale, row, num_rows);
      rows.is_plain = rows.is_plain && rows.scale[i] >= 0x1p-60f && rows.scale[i] <= 0x1p60f;
    }
  }
  rows.is_plain = __all_sync(0xffffffffu, rows.is_plain);
  return rows;
}

// Two neighbouring sums of each of a thread's rows, from column `column` of the tile on, as elements
// of h. kIsFull: a whole tile, pairs of columns aligned, rows plain.
template <bool kIsFull>
__device__ __forceinline__ void undo_scales(float (&value)[2 * kRowTiles][2], const Rows& rows,
                                            const float* __restrict__ column_scale, int column,
                                            int num_columns) {
  if constexpr (kScales && kIsFull) {  // pairs of columns are aligned in y, so here too
    const float2 scales = __ldcg(reinterpret_cast<const float2*>(column_scale + column));
    const float by_first = inverse_of(scales.x);
    const float by_second = inverse_of(scales.y);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const float by_row = inverse_of(rows.scale[i]);
      value[i][0] = value[i][0] * by_row * by_first;
      value[i][1] = value[i][1] * by_row * by_second;
    }
  } else if constexpr (kScales) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float scale = scale_at(column_scale, column + c, num_columns);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        if constexpr (kHoldsInverses) {
          value[i][c] = float(double(value[i][c]) * double(rows.scale[i]) * double(scale));
        } else {
          float first, second;
          mma_range::undo_factors(rows.scale[i], scale, &first, &second);
          value[i][c] = value[i][c] * first * second;
        }
      }
    }
  }
}

constexpr int kStrip = 16;  // columns of a thread, in pairs, whose moments it holds at once
static_assert(kSums / 2 % kStrip == 0, "whole strips");

// Undoes the scales, writes h to y (kExchanges: keeps it), and leaves the moments of each column
// over this warp's rows in moments[warp][mean, m2][column], for one strip from the thread's column
// kFirst on.
template <bool kIsFull, int kFirst>
__device__ __forceinline__ void finish_strip(Sums& totals, const Rows& rows, float* moments,
                                             const float* __restrict__ column_scale,
                                             int num_columns, const Place& at) {
  float count = 0.0f;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) count += kIsFull || rows.is_inside[i] ? 1.0f : 0.0f;
  const float inverse = count > 0.0f ? 1.0f / count : 0.0f;
  float mean[kStrip], m2[kStrip];
#pragma unroll
  for (int j = 0; j < kStrip; j += 2) {
    const int column = 4 * (kFirst + j) + 2 * at.member;
    float value[2 * kRowTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      value[i][0] = totals[i / 2][2 * (kFirst + j) + i % 2 * 2];
      value[i][1] = totals[i / 2][2 * (kFirst + j) + i % 2 * 2 + 1];
    }
    undo_scales<kIsFull>(value, rows, column_scale, column, num_columns);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      if constexpr (kExchanges) {
        totals[i / 2][2 * (kFirst + j) + i % 2 * 2] = value[i][0];
        totals[i / 2][2 * (kFirst + j) + i % 2 * 2 + 1] = value[i][1];
      } else if constexpr (kIsFull) {
        *reinterpret_cast<float2*>(rows.line[i] + column) = make_float2(value[i][0], value[i][1]);
      } else if (rows.is_inside[i]) {
        if (column < num_columns) rows.line[i][column] = value[i][0];
        if (column + 1 < num_columns) rows.line[i][column + 1] = value[i][1];
      }
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float shift = value[0][c];  // if any row is inside, the first one is
      float sum = 0.0f;
#pragma unroll
      for (int i = 1; i < 2 * kRowTiles; ++i) {
        sum += kIsFull || rows.is_inside[i] ? value[i][c] - shift : 0.0f;
      }
      const float offset = sum * inverse;
      float square = kIsFull || rows.is_inside[0] ? offset * offset : 0.0f;
#pragma unroll
      for (int i = 1; i < 2 * kRowTiles; ++i) {
        const float deviation = value[i][c] - shift - offset;
        square += kIsFull || rows.is_inside[i] ? deviation * deviation : 0.0f;
      }
      mean[j + c] = shift + offset;
      m2[j + c] = square;
    }
  }
  merge_half<kIsFull, kStrip / 2, 16>(mean, m2, count);
  merge_half<kIsFull, kStrip / 4, 8>(mean, m2, count);
  merge_half<kIsFull, kStrip / 8, 4>(mean, m2, count);
  const int first = (at.group >> 2 & 1) * (kStrip / 2) + (at.group >> 1 & 1) * (kStrip / 4) +
                    (at.group & 1) * (kStrip / 8);
  const int column = (kFirst + first) / 2 * 8 + 2 * at.member;
  float* mine = moments + (at.consumer * 4 + at.warp) * 2 * kBlockN + column;
  *reinterpret_cast<float2*>(mine) = make_float2(mean[0], mean[1]);
  *reinterpret_cast<float2*>(mine + kBlockN) = make_float2(m2[0], m2[1]);
}

template <bool kIsFull, int kFirst = 0>
__device__ __forceinline__ void finish_tile(Sums& totals, const Rows& rows, float* moments,
                                            const float* __restrict__ column_scale,
                                            int num_columns) {
  finish_strip<kIsFull, kFirst>(totals, rows, moments, column_scale, num_columns, place());
  if constexpr (kFirst + kStrip < kSums / 2) {
    finish_tile<kIsFull, kFirst + kStrip>(totals, rows, moments, column_scale, num_columns);
  }
}

// A column of the tile, from what its warps left of their `num_rows` rows.
__device__ __forceinline__ Moments moments_of_tile(const float* moments, int column,
                                                   int num_rows) {
  Moments total = Moments();
#pragma unroll
  for (int warp = 0; warp < kConsumerWarps; ++warp) {
    int rows = 0;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      rows += rows_inside(first_row_of(warp / 4, warp % 4, i), 16, num_rows);
    }
    const float* theirs = moments + warp * 2 * kBlockN + column;
    if (rows > 0) {
      total = merge_moments(total, {static_cast<float>(rows), theirs[0], theirs[kBlockN]});
    }
  }
  return total;
}

// What becomes of the tile's columns where that is known before them: `affine`, in shared memory,
// is [centre, slope, shift][column].
__device__ __forceinline__ void find_affine(float* affine, const ColumnStats& stats,
                                            const float* __restrict__ beta, int64_t first_column,
                                            int num_columns, int barrier) {
  for (int column = threadIdx.x - 128; column < num_columns; column += kConsumerThreads) {
    const Affine found = known_affine(stats, beta, first_column + column);
    affine[column] = found.centre;
    affine[kBlockN + column] = found.slope;
    affine[2 * kBlockN + column] = found.shift;
  }
  wgmma_pipeline::named_sync<kConsumerThreads>(barrier);
}
{% if stats in ["cluster", "gram"] %}

// y from `affine` and the sums, which are as the products left them (gram), or finish_tile has made
// them elements of h (cluster).
template <bool kIsFull>
__device__ __forceinline__ void write_tile(const Sums& totals, const Rows& rows,
                                           float* __restrict__ tile_of_y, int64_t stride,
                                           const float* affine,
                                           const float* __restrict__ column_scale, int num_rows,
                                           int num_columns) {
  const Place at = place();
#pragma unroll
  for (int j = 0; j < kSums / 2; j += 2) {
    const int column = 4 * j + 2 * at.member;
    float value[2 * kRowTiles][2];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      value[i][0] = totals[i / 2][2 * j + i % 2 * 2];
      value[i][1] = totals[i / 2][2 * j + i % 2 * 2 + 1];
    }
    if constexpr (kIsKnown) undo_scales<kIsFull>(value, rows, column_scale, column, num_columns);
    const float2 centre = *reinterpret_cast<const float2*>(affine + column);
    const float2 slope = *reinterpret_cast<const float2*>(affine + kBlockN + column);
    const float2 shift = *reinterpret_cast<const float2*>(affine + 2 * kBlockN + column);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const float first = fmaf(value[i][0] - centre.x, slope.x, shift.x);
      const float second = fmaf(value[i][1] - centre.y, slope.y, shift.y);
      const int row = first_row_of(at.consumer, at.warp, i / 2) + at.group + i % 2 * 8;
      float* line = tile_of_y + row * stride;
      if constexpr (kIsFull) {
        *reinterpret_cast<float2*>(line + column) = make_float2(first, second);
      } else if (row < num_rows) {
        if (column < num_columns) line[column] = first;
        if (column + 1 < num_columns) line[column + 1] = second;
      }
    }
  }
}
{% else %}

// y of eval mode, from what this thread has just written: with the sums still in registers, training
// mode would pay for it.
__device__ __forceinline__ void write_again(float* __restrict__ y, const ColumnStats& stats,
                                            const float* __restrict__ beta, float* affine,
                                            int64_t row_tile, int64_t first_column,
                                            int barrier) {
  // Places are worked out anew: kept, they would take registers from training mode as well.
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread), "+l"(row_tile), "+l"(first_column));
  const int64_t first_row = row_tile * kBlockM;
  const int num_rows = static_cast<int>(min(stats.rows - first_row, int64_t{kBlockM}));
  const int num_columns = static_cast<int>(min(stats.columns - first_column, int64_t{kBlockN}));
  find_affine(affine, stats, beta, first_column, num_columns, barrier);
  constexpr int kBatch = 8;  // pairs on their way
  const int first = (thread / 128 - 1) * kRowTiles * 64 + thread / 32 % 4 * 16 + thread % 32 / 4;
#pragma unroll 1
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    const int row = first + i / 2 * 64 + i % 2 * 8;
    if (row >= num_rows) break;
    float* line = y + (first_row + row) * stats.columns + first_column;
    if (stats.columns % 2 == 0) {
#pragma unroll 1
      for (int begin = thread % 4 * 2; begin < num_columns; begin += 8 * kBatch) {
        float2 h[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int column = begin + 8 * b;
          if (column < num_columns) h[b] = *reinterpret_cast<const float2*>(line + column);
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          const int column = begin + 8 * b;
          if (column >= num_columns) break;
          const float2 centre = *reinterpret_cast<const float2*>(affine + column);
          const float2 slope = *reinterpret_cast<const float2*>(affine + kBlockN + column);
          const float2 shift = *reinterpret_cast<const float2*>(affine + 2 * kBlockN + column);
          *reinterpret_cast<float2*>(line + column) =
              make_float2(fmaf(h[b].x - centre.x, slope.x, shift.x),
                          fmaf(h[b].y - centre.y, slope.y, shift.y));
        }
      }
    } else {
#pragma unroll 1
      for (int e = 0; e < kBlockN / 4; ++e) {
        const int column = e / 2 * 8 + thread % 4 * 2 + e % 2;
        if (column >= num_columns) break;
        line[column] = fmaf(line[column] - affine[column], affine[kBlockN + column],
                            affine[2 * kBlockN + column]);
      }
    }
  }
}

// Hands in what is known of the tile's columns.
__device__ __forceinline__ void publish_tile(const ColumnStats& stats, const float* moments,
                                             int64_t row_tile, int64_t first_column,
                                             int num_rows) {
  for (int column = threadIdx.x - 128; column < kBlockN; column += kConsumerThreads) {
    if (first_column + column >= stats.columns) break;
    publish_moments<kTileStats>(stats, row_tile, first_column + column,
                                moments_of_tile(moments, column, num_rows));
  }
}
{% endif %}
