// Barriers in shared memory, bulk tensor copies and clusters (sm_90).
{# Which accesses of other blocks a wait or an arrival orders is one word of its instruction. #}
{% macro waiting(name, order) -%}
__device__ __forceinline__ void {{ name }}(unsigned barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity{{ order }}.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
{%- endmacro %}
{% macro arriving(name, order) -%}
__device__ __forceinline__ void {{ name }}(unsigned barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive{{ order }}.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
{%- endmacro %}
namespace wgmma_pipeline {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
}

{{ waiting("wait", "") }}

// One arrival, and `bytes` that copies will bring before the phase can end.
__device__ __forceinline__ void expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier of the same address in block `rank` of the cluster.
{{ arriving("arrive_at", "") }}

// The same, for what was written to shared memory: whoever waits at the barrier sees it.
{{ arriving("tell", ".release.cluster") }}

// For what other blocks of the cluster tell.
{{ waiting("wait_for_cluster", ".acquire.cluster") }}

// What block `rank` of the cluster has at this address of its shared memory.
__device__ __forceinline__ float load_from(unsigned address, unsigned rank) {
  float value;
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %1, %2;\n"
      "ld.shared::cluster.f32 %0, [remote];\n"
      "}\n"
      : "=f"(value)
      : "r"(address), "r"(rank)
      : "memory");
  return value;
}

// Four numbers of this block's shared memory.
__device__ __forceinline__ void load_four(float (&to)[4], unsigned address) {
  asm volatile("ld.shared.v4.f32 { %0, %1, %2, %3}, [%4];"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "r"(address)
               : "memory");
}

// Two numbers of this block's shared memory.
__device__ __forceinline__ void load_two(float* one, float* other, unsigned address) {
  asm volatile("ld.shared.v2.f32 { %0, %1}, [%2];"
               : "=f"(*one), "=f"(*other)
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_two(unsigned address, float one, float other) {
  asm volatile("st.shared.v2.f32 [%0], { %1, %2};" ::"r"(address), "f"(one), "f"(other)
               : "memory");
}

__device__ __forceinline__ void prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void copy(unsigned target, const CUtensorMap* map, unsigned barrier,
                                     int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, { %3, %4}], [%2];" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row)
      : "memory");
}

// To the same address in every block of the cluster whose bit is set; each one's own barrier
// counts the bytes.
__device__ __forceinline__ void copy_to_all(unsigned target, const CUtensorMap* map,
                                            unsigned barrier, int column, int row,
                                            unsigned short blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, { %3, %4}], [%2], %5;" ::"r"(target),
      "l"(map), "r"(barrier), "r"(column), "r"(row), "h"(blocks)
      : "memory");
}

// By all lanes of a warp: what they wrote to global memory is there for who sees the count.
__device__ __forceinline__ void publish_count(int* count) {
  __threadfence();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
  }
}

__device__ __forceinline__ void wait_for_count(const int* count, int expected) {
  int found;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
  } while (found < expected);
}

// Between ordinary accesses to memory and the copy engine's, on both sides.
__device__ __forceinline__ void fence_copies() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// A barrier of the first kThreads threads that call it, apart from __syncthreads().
template <int kThreads>
__device__ __forceinline__ void named_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// For those who wait at such a barrier, without waiting there.
template <int kThreads>
__device__ __forceinline__ void named_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace wgmma_pipeline
