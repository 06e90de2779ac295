// Warpgroup matrix products (sm_90a): 64 rows times block_n columns, both operands K-major in
// shared memory as the copy engine swizzles them, float32 sums (of 8-bit integers, int32) in
// registers.
namespace wgmma_products {

// What one element of an operand in shared memory is.
enum class Type { kFloat16, kBfloat16, kTf32, kFloat8, kInt8 };

constexpr int kColumns = {{ block_n }};
constexpr int kStepBytes = 32;  // bytes of a row that one instruction reads
constexpr int kSums = kColumns / 2;

// kRowBytes: bytes of a row before the next one begins, which is also what is swizzled over.
template <int kRowBytes>
__device__ __forceinline__ uint64_t descriptor(unsigned address) {
  static_assert(kRowBytes == 32 || kRowBytes == 64 || kRowBytes == 128, "a swizzle");
  constexpr uint64_t kSwizzle = kRowBytes == 128 ? 1 : kRowBytes == 64 ? 2 : 3;
  constexpr uint64_t kEightRows = 8 * kRowBytes / 16;
  return kSwizzle << 62 | kEightRows << 32 | uint64_t{1} << 16 |
         static_cast<uint64_t>((address & 0x3ffff) >> 4);
}

// Registers written before are visible to the products that follow.
__device__ __forceinline__ void begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving the sums while products are under way.
__device__ __forceinline__ void pin(float (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ __forceinline__ void pin(int (&sums)[kSums]) {
#pragma unroll
  for (int i = 0; i < kSums; ++i) asm volatile("" : "+r"(sums[i])::"memory");
}

// Products that were begun read their left operand from registers until they are waited for; the
// compiler takes it for read at once. After the wait, this says that it was needed until then.
template <int kSteps>
__device__ __forceinline__ void hold(const unsigned (&left)[kSteps][4]) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" ::"r"(left[step][i]));
  }
}

{% set num_sums = block_n // 2 %}
{# `left`: how many registers the left operand is in; 1 is a descriptor of shared memory. #}
{% macro instruction(shape, types, flags, sum="f", left=1) -%}
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.b32 p, %{{ num_sums + left + 1 }}, 0;\n"
        "wgmma.mma_async.sync.aligned.{{ shape }}.{{ types }} {"
{% for row in range(0, num_sums, 16) %}
        "{% for i in range(row, [row + 16, num_sums] | min) %}%{{ i }}{{ ", " if i + 1 < num_sums }}{% endfor %}"
{% endfor %}
        "}, {{ "{" if left > 1 }}"
        "{% for i in range(num_sums, num_sums + left) %}%{{ i }}{{ ", " if not loop.last }}{% endfor %}"
        "{{ "}" if left > 1 }}, %{{ num_sums + left }}, p{{ flags }};\n"
        "}\n"
        : {% for i in range(num_sums) %}"+{{ sum }}"(sums[{{ i }}]){{ ", " if i + 1 < num_sums }}{{ "\n          " if i % 6 == 5 }}{% endfor %}

        : {{ '"r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3])' if left > 1 else '"l"(left)' }}, "l"(right),
          "r"(accumulate));
{%- endmacro %}
// sums (+)= left right^T over 32 bytes of k: 8, 16 or 32 elements.
template <Type kType>
__device__ __forceinline__ void multiply(float (&sums)[kSums], uint64_t left, uint64_t right,
                                         int accumulate) {
  if constexpr (kType == Type::kFloat16) {
    {{ instruction("m64n%dk16" % block_n, "f32.f16.f16", ", 1, 1, 0, 0") }}
  } else if constexpr (kType == Type::kBfloat16) {
    {{ instruction("m64n%dk16" % block_n, "f32.bf16.bf16", ", 1, 1, 0, 0") }}
  } else if constexpr (kType == Type::kTf32) {
    {{ instruction("m64n%dk8" % block_n, "f32.tf32.tf32", ", 1, 1") }}
  } else {
    {{ instruction("m64n%dk32" % block_n, "f32.e4m3.e4m3", ", 1, 1") }}
  }
}
{% if block_n % 16 == 0 %}

// The same with the bits of sums: int32 ones of 8-bit integers, float32 ones otherwise.
template <Type kType>
__device__ __forceinline__ void multiply(int (&sums)[kSums], uint64_t left, uint64_t right,
                                         int accumulate) {
  static_assert(kType == Type::kInt8 || kType == Type::kFloat16, "not needed");
  if constexpr (kType == Type::kInt8) {
    {{ instruction("m64n%dk32" % block_n, "s32.s8.s8", "", "r") }}
  } else {
    {{ instruction("m64n%dk16" % block_n, "f32.f16.f16", ", 1, 1, 0, 0", "r") }}
  }
}
{% endif %}

// The same with the left operand in registers, laid out as mma.m16n8k16's (k32's) is.
template <Type kType>
__device__ __forceinline__ void multiply_registers(float (&sums)[kSums],
                                                   const unsigned (&left)[4], uint64_t right,
                                                   int accumulate) {
  static_assert(kType != Type::kTf32 && kType != Type::kInt8, "not from registers");
  if constexpr (kType == Type::kFloat16) {
    {{ instruction("m64n%dk16" % block_n, "f32.f16.f16", ", 1, 1, 0", left=4) }}
  } else if constexpr (kType == Type::kBfloat16) {
    {{ instruction("m64n%dk16" % block_n, "f32.bf16.bf16", ", 1, 1, 0", left=4) }}
  } else {
    {{ instruction("m64n%dk32" % block_n, "f32.e4m3.e4m3", ", 1, 1", left=4) }}
  }
}

}  // namespace wgmma_products
