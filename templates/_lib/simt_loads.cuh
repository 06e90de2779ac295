// Tiles of the template simt on their way from global to shared memory, where they lie transposed.
//
// Expects kThreads, kBlockK and kPad before it, and the parameter load.
{% if load == "async" %}
__device__ __forceinline__ void copy_async(float* shared, const float* global, bool is_inside) {
  const unsigned address = unsigned(__cvta_generic_to_shared(shared));
  const int bytes = is_inside ? 4 : 0;  // the other bytes become zero
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], 4, %2;\n" ::"r"(address),
               "l"(global), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commit_async() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait_async() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

// Copies kRows x kBlockK of an operand: 8 threads along k (one sector), the others along rows.
template <int kRows>
struct Loader {
  static constexpr int kSweep = kThreads / 8;  // rows at once
  static constexpr int kSteps = (kRows + kSweep - 1) / kSweep;
  const float* source[kSteps];

  // Rows past the end repeat the last one: their results are never stored or counted.
  __device__ __forceinline__ void start(const float* matrix, int64_t first_row, int64_t num_rows,
                                        int64_t length) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int64_t row = first_row + threadIdx.x / 8 + i * kSweep;
      row = row < num_rows ? row : num_rows - 1;
      source[i] = matrix + row * length + threadIdx.x % 8;
    }
  }

  // `k_left`: values along k from the start of this step to the end of the matrix.
  __device__ __forceinline__ void issue(float* buffer, int64_t k_left) {
    const int along = threadIdx.x % 8;
    const int down = threadIdx.x / 8;
#pragma unroll
    for (int j = 0; j < kBlockK; j += 8) {
      const bool is_inside = along + j < k_left;
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (kRows % kSweep == 0 || down + i * kSweep < kRows) {
          copy_async(buffer + (along + j) * (kRows + kPad) + down + i * kSweep, source[i] + j,
                     is_inside);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      source[i] += kBlockK;
    }
  }
};
{% else %}
// Carries kRows x kBlockK of an operand through registers, four values along k at a time; a warp
// takes 2 x 4 values of 16 rows, which reads whole sectors and stores without bank conflicts.
template <int kRows, bool kIsVector>
struct Loader {
  static constexpr int kUnits = kRows * kBlockK / 4;
  static constexpr int kSteps = (kUnits + kThreads - 1) / kThreads;
  const float* source[kSteps];
  float4 held[kSteps];

  __device__ __forceinline__ static int row_of(int i) {
    return (int(threadIdx.x) + i * kThreads) / 2 % kRows;
  }

  __device__ __forceinline__ static int k_of(int i) {
    const int unit = int(threadIdx.x) + i * kThreads;
    return 4 * (unit % 2 + 2 * (unit / (2 * kRows)));
  }

  __device__ __forceinline__ static bool has(int i) {
    return kUnits % kThreads == 0 || int(threadIdx.x) + i * kThreads < kUnits;
  }

  // Rows past the end repeat the last one: their results are never stored or counted.
  __device__ __forceinline__ void start(const float* matrix, int64_t first_row, int64_t num_rows,
                                        int64_t length) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      int64_t row = first_row + row_of(i);
      row = row < num_rows ? row : num_rows - 1;
      source[i] = matrix + row * length + k_of(i);
    }
  }

  // `k_left`: values along k from the start of this step to the end of the matrix.
  __device__ __forceinline__ void fetch(int64_t k_left) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      held[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const int k = k_of(i);
      if (has(i)) {
        if (kIsVector) {  // then 4 divides the length
          if (k < k_left) {
            held[i] = __ldg(reinterpret_cast<const float4*>(source[i]));
          }
        } else {
          held[i].x = k < k_left ? __ldg(source[i]) : 0.0f;
          held[i].y = k + 1 < k_left ? __ldg(source[i] + 1) : 0.0f;
          held[i].z = k + 2 < k_left ? __ldg(source[i] + 2) : 0.0f;
          held[i].w = k + 3 < k_left ? __ldg(source[i] + 3) : 0.0f;
        }
      }
      source[i] += kBlockK;
    }
  }

  __device__ __forceinline__ void store(float* buffer) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (has(i)) {
        float* place = buffer + k_of(i) * (kRows + kPad) + row_of(i);
        place[0] = held[i].x;
        place[kRows + kPad] = held[i].y;
        place[2 * (kRows + kPad)] = held[i].z;
        place[3 * (kRows + kPad)] = held[i].w;
      }
    }
  }
};
{% endif %}
