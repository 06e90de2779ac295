// Power-of-two scales that bring each row of a matrix into float16's range, without rounding.
//
// A row whose largest magnitude lies in [2^e, 2^(e+1)) is multiplied by 2^(14-e): the largest
// element then stays below 2^15 (float16 ends at 65504), and every element down to 2^-16 of it
// keeps 22 bits in two float16 parts; what is smaller is off by at most 2^-40 of the largest.
// The exponent is kept within [-114, 126], so that the scale is a normal float32: a row of tiny
// elements is scaled less than it could be, and a row with Inf or NaN stays Inf or NaN.
namespace mma_range {

constexpr int kMinExponent = -114;
constexpr int kMaxExponent = 126;

__device__ __forceinline__ float power_of_two(int exponent) {  // exponent in [-126, 127]
  return __int_as_float((exponent + 127) << 23);
}

// `largest`: the bits of the largest magnitude (sign cleared; Inf and NaN are the largest).
__device__ __forceinline__ float scale_of(unsigned largest) {
  const int exponent = static_cast<int>(largest >> 23) - 127;
  return power_of_two(max(kMinExponent, min(kMaxExponent, 14 - exponent)));
}

// The two factors whose product undoes both scales. One factor might not be a float32 number;
// and with both of one sign nothing overflows or underflows on the way but the result itself.
__device__ __forceinline__ void undo_factors(float row_scale, float column_scale, float* first,
                                             float* second) {
  const int exponent =
      254 - (__float_as_int(row_scale) >> 23) - (__float_as_int(column_scale) >> 23);
  const int half = exponent >> 1;
  *first = power_of_two(half);
  *second = power_of_two(exponent - half);
}

// One warp finds the largest magnitude of one row, as bits: their order is that of the numbers.
__device__ __forceinline__ unsigned largest_of_row(const float* __restrict__ row, int64_t length,
                                                   bool vector) {
  const int lane = threadIdx.x % 32;
  unsigned largest = 0;
  if (vector) {
    const uint4* chunks = reinterpret_cast<const uint4*>(row);
#pragma unroll 8
    for (int64_t i = lane; i < length / 4; i += 32) {
      const uint4 v = __ldg(chunks + i);
      largest = max(max(largest, max(v.x & 0x7fffffffu, v.y & 0x7fffffffu)),
                    max(v.z & 0x7fffffffu, v.w & 0x7fffffffu));
    }
  } else {
#pragma unroll 4
    for (int64_t i = lane; i < length; i += 32) {
      largest = max(largest, __float_as_uint(__ldg(row + i)) & 0x7fffffffu);
    }
  }
  return __reduce_max_sync(0xffffffffu, largest);
}

}  // namespace mma_range
