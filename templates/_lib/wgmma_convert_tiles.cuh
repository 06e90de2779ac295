// The end of a tile of the template wgmma_convert: y, and moments of its columns.

// Merges a column's moments with those of the lane whose number differs in kMask.
template <int kMask>
__device__ __forceinline__ Moments merge_with(Moments mine) {
  Moments theirs;
  theirs.count = __shfl_xor_sync(0xffffffffu, mine.count, kMask);
  theirs.mean = __shfl_xor_sync(0xffffffffu, mine.mean, kMask);
  theirs.m2 = __shfl_xor_sync(0xffffffffu, mine.m2, kMask);
  return merge_moments(mine, theirs);
}

// What this thread's two columns of y are written as: h, to be normalised, or in eval mode the output.
struct Maps {
  float slope[2] = {1.0f, 1.0f};
  float shift[2] = {0.0f, 0.0f};
};

__device__ __forceinline__ Maps maps_of(const ColumnStats& stats, const float* __restrict__ beta,
                                        int64_t column) {
  Maps maps;
  if (stats.running_var != nullptr) {
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (column + s < stats.columns) {
        const Affine found = known_affine(stats, beta, column + s);
        maps.slope[s] = found.slope;
        maps.shift[s] = found.shift;
      }
    }
  }
  return maps;
}

// Undoes the scales of x, writes this thread's two columns of y, and hands in their moments. A thread's sums are at rows 8 * j + 2 * member (+ 1) of the tile of x.
template <bool kIsFull>
__device__ __forceinline__ void finish_tile(float (&totals)[kSums], const ColumnStats& stats,
                                            const Maps& maps, float* __restrict__ y,
                                            const float* __restrict__ row_scale,
                                            int64_t tile, int64_t first_row, int64_t column,
                                            const Place& at) {
  const int num_rows =
      kIsFull ? kBlockN : static_cast<int>(min(stats.rows - first_row, int64_t{kBlockN}));
  float* line = y + (first_row + 2 * at.member) * stats.columns + column;
#pragma unroll
  for (int j = 0; j < kSums / 4; ++j) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = 8 * j + 2 * at.member + r;
      const bool is_inside = kIsFull || row < num_rows;
      const float scale = is_inside ? row_scale[first_row + row] : 1.0f;
      const int exponent = kHeadroom + 127 - (__float_as_int(scale) >> 23);
      // Half of it twice: with both of one sign nothing overflows on the way but the result itself.
      const float half = mma_range::power_of_two(exponent >> 1);
      const float rest = mma_range::power_of_two(exponent - (exponent >> 1));
      float& first = totals[4 * j + r];
      float& second = totals[4 * j + 2 + r];
      first = first * half * rest;
      second = second * half * rest;
      float* to = line + (8 * j + r) * stats.columns;
      const float y_first = fmaf(first, maps.slope[0], maps.shift[0]);
      const float y_second = fmaf(second, maps.slope[1], maps.shift[1]);
      if constexpr (kIsFull) {
        *reinterpret_cast<float2*>(to) = make_float2(y_first, y_second);
      } else if (is_inside) {
        if (column < stats.columns) to[0] = y_first;
        if (column + 1 < stats.columns) to[1] = y_second;
      }
    }
  }
  if (stats.running_var != nullptr) return;
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const float shift = totals[2 * s];
    float count = 0.0f;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      if (kIsFull || i / 2 * 8 + 2 * at.member + i % 2 < num_rows) {
        sum += totals[i / 2 * 4 + 2 * s + i % 2] - shift;
        count += 1.0f;
      }
    }
    const float offset = count > 0.0f ? sum / count : 0.0f;
    Moments moments = Moments();
#pragma unroll
    for (int i = 0; i < kSums / 2; ++i) {
      if (kIsFull || i / 2 * 8 + 2 * at.member + i % 2 < num_rows) {
        const float deviation = totals[i / 2 * 4 + 2 * s + i % 2] - shift - offset;
        moments.m2 = fmaf(deviation, deviation, moments.m2);
      }
    }
    moments.count = count;
    moments.mean = count > 0.0f ? shift + offset : 0.0f;
    moments = merge_with<2>(merge_with<1>(moments));
    if (at.member == 0 && column + s < stats.columns) {
      publish_moments<kStats>(stats, tile, column + s, moments);
    }
  }
}
