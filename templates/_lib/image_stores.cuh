// The end of a tile of a convolution by Hopper's products: sums, scaled back, with the bias and
// pointwise work, go by way of shared memory to whole lines of the result.
namespace images {

struct Plain {  // no pointwise work behind the convolution
  __device__ __forceinline__ float operator()(float value, int64_t, int64_t, int64_t, int64_t,
                                              int64_t) const {
    return value;
  }
};

// Threads of a warpgroup wait for each other; 0 is of all threads.
__device__ __forceinline__ void wait_for_warpgroup(int consumer) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kConsumers; ++i) {  // by numbers that the compiler can count
    if (consumer == i) wgmma_pipeline::named_sync<128>(1 + i);
  }
}

// A thread has, of each group of 8 channels, two beside each other for two rows. `first` is the
// first group of those that there is room for.
template <bool kPaired, int kPhases>
__device__ __forceinline__ void stage_sums(float* staged,
                                           const float (&totals)[kPhases][kGroups][kSums],
                                           int group, int first, bool is_odd_first) {
  constexpr int kPitch = Staged<kPaired>::kPitch;
  const int thread = threadIdx.x % 128;
  const int row = thread / 32 * 16 + thread % 32 / 4;
  float* own = staged + thread % 4 * 2 * kPitch + (kPaired ? 2 : 1) * row;
#pragma unroll
  for (int i = 0; i < kStagedChannels<kPaired> / 8; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // of two rows, two channels
      const int from = (first + i) * 4 + j;
      float* to = own + (i * 8 + j % 2) * kPitch;
      if constexpr (kPaired) {
        const float one = totals[0][group][from], other = totals[1][group][from];
        *reinterpret_cast<float2*>(to + j / 2 * 16) =
            is_odd_first ? make_float2(other, one) : make_float2(one, other);
      } else {
        to[j / 2 * 8] = totals[0][group][from];
      }
    }
  }
}

template <int kVector>
__device__ __forceinline__ void load_vector(float (&values)[kVector], const float* from) {
  if constexpr (kVector == 4) {
    const float4 found = *reinterpret_cast<const float4*>(from);
    values[0] = found.x, values[1] = found.y, values[2] = found.z, values[3] = found.w;
  } else if constexpr (kVector == 2) {
    const float2 found = *reinterpret_cast<const float2*>(from);
    values[0] = found.x, values[1] = found.y;
  } else {
    values[0] = *from;
  }
}

template <int kVector>
__device__ __forceinline__ void store_vector(float* to, const float (&values)[kVector]) {
  if constexpr (kVector == 4) {
    *reinterpret_cast<float4*>(to) = make_float4(values[0], values[1], values[2], values[3]);
  } else if constexpr (kVector == 2) {
    *reinterpret_cast<float2*>(to) = make_float2(values[0], values[1]);
  } else {
    *to = values[0];
  }
}

// The smaller power of two first: nothing on the way is beyond float32.
__device__ __forceinline__ float scaled_back(float value, float one, float other) {
  return value * fminf(one, other) * fmaxf(one, other);
}

// What is staged of some channels, the first of which is `first`. A thread reads a few vectors
// before it stores any.
template <bool kPaired, int kVector, class Epilogue>
__device__ __forceinline__ void store_staged(const float* staged, const Work& work,
                                             const Epilogue& epilogue, const Tile& tile,
                                             const Share& share, int pixel, int first,
                                             float unit) {
  constexpr int kStep = share_of<kPaired, kVector>(0).channels;
  constexpr int kTurns = kStagedChannels<kPaired> / kStep;
  constexpr int kAtOnce = kConsumerRegisters < 64 ? 1 : kTurns < 4 ? kTurns : 4;
  static_assert(kTurns * kStep == kStagedChannels<kPaired>, "all channels are stored");
  static_assert(kTurns % kAtOnce == 0, "all vectors are stored");
  const Geometry& of = work.of;
  if (pixel < 0) return;
  const int made = of.made[0] * of.made[1] * of.made[2];
  const int rows = of.column_tiles * kColumns;
  const bool is_odd = kPaired && even_phase(of, tile) != share.pixel % 2;
  int own = first + share.channel;
  // Of the phase of the first pixel, and of the second one, where that is another.
  const float* units = work.unit + tile.phase * rows + own + (is_odd ? rows : 0);
  const int to_other = is_odd ? -rows : rows;
  const float* bias = work.bias + own;
  const float* from = staged + share.channel * Staged<kPaired>::kPitch + share.pixel;
  float* to = work.out + (int64_t(tile.sample) * of.columns + own) * made + pixel;
#pragma unroll 1
  for (int turn = 0; turn < kTurns; turn += kAtOnce) {
    float values[kAtOnce][kVector], ones[kAtOnce], others[kAtOnce], more[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      // Units are of whole tiles of channels, a bias is not. What another kernel wrote while this
      // one was there already is read by ordinary loads.
      ones[i] = units[i * kStep];
      others[i] = kPaired && kVector > 1 ? units[to_other + i * kStep] : ones[i];
      more[i] = 0.0f;
      if (work.bias != nullptr && own + i * kStep < of.columns) {
        more[i] = __ldg(bias + i * kStep);
      }
      load_vector(values[i], from + i * kStep * Staged<kPaired>::kPitch);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int column = own + i * kStep;
      if (column < of.columns) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const float other = j % 2 == 0 ? ones[i] : others[i];
          const float value = scaled_back(values[i][j], unit, other) + more[i];
          values[i][j] = epilogue(value, tile.sample, column, pixel + j, of.columns, made);
        }
        store_vector(to + int64_t(i * kStep) * made, values[i]);
      }
    }
    own += kAtOnce * kStep;
    units += kAtOnce * kStep;
    bias += kAtOnce * kStep;
    from += kAtOnce * kStep * Staged<kPaired>::kPitch;
    to += int64_t(kAtOnce * kStep) * made;
  }
}

template <bool kPaired, int kVector, int kPhases, class Epilogue>
__device__ __forceinline__ void store_tile(const float (&totals)[kPhases][kGroups][kSums],
                                           float* staged, const int4* origins,
                                           const Work& work, const Epilogue& epilogue,
                                           const Tile& tile, int consumer, float unit) {
  const Geometry& of = work.of;
  const Share share = share_of<kPaired, kVector>(threadIdx.x % 128);
  const bool is_odd_first = kPaired && even_phase(of, tile) == 1;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    const int4 first_pixel = origins[group];
    const int origin[3] = {first_pixel.z, first_pixel.y, first_pixel.x};
    const int pixel = made_pixel<kPaired>(of, tile, origin, share.pixel);
#pragma unroll
    for (int first = 0; first < kColumns; first += kStagedChannels<kPaired>) {
      wait_for_warpgroup(consumer);  // until what was there before is stored
      stage_sums<kPaired>(staged, totals, group, first / 8, is_odd_first);
      wait_for_warpgroup(consumer);
      store_staged<kPaired, kVector>(staged, work, epilogue, tile, share, pixel,
                                     tile.column_tile * kColumns + first, unit);
    }
  }
  __syncwarp();  // products are of whole warps
}

}  // namespace images
