// What a cluster's blocks have in shared memory, and how they reach each other's: what
// `cluster_rows.cuh` needs of sm_90, by pointers in place of addresses.
namespace cluster_memory {

using wgmma_pipeline::shared_address;

__device__ __forceinline__ char* shared() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

__device__ __forceinline__ unsigned rank() { return wgmma_pipeline::cluster_rank(); }

// Of all threads of all blocks.
__device__ __forceinline__ void sync_cluster() { wgmma_pipeline::cluster_sync(); }

// Of the first kThreads threads of a block.
template <int kThreads>
__device__ __forceinline__ void sync_some() {
  wgmma_pipeline::named_sync<kThreads>(1);
}

__device__ __forceinline__ void init(uint64_t* barrier, int arrivals) {
  wgmma_pipeline::init_barrier(shared_address(barrier), arrivals);
}

__device__ __forceinline__ void publish_barriers() { wgmma_pipeline::publish_barriers(); }

// Waits for the end of a phase: of the last one that had this parity.
__device__ __forceinline__ void wait(uint64_t* barrier, unsigned parity) {
  wgmma_pipeline::wait(shared_address(barrier), parity);
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  wgmma_pipeline::arrive(shared_address(barrier));
}

__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
  wgmma_pipeline::expect(shared_address(barrier), bytes);
}

// 16 bytes or a multiple of them, all aligned to 16.
__device__ __forceinline__ void copy(void* target, const void* source, int bytes,
                                     uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
      ::"r"(shared_address(target)), "l"(source), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void fence_copies() { wgmma_pipeline::fence_copies(); }

// Stores at the same place in the shared memory of a block of the cluster.
__device__ __forceinline__ void store_at(double* place, unsigned rank, double value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.f64 [remote], %2;\n"
      "}\n" ::"r"(shared_address(place)),
      "r"(rank), "d"(value)
      : "memory");
}

// Arrives at that block's barrier: whoever waits at it sees what this thread stored.
__device__ __forceinline__ void tell(uint64_t* barrier, unsigned rank) {
  wgmma_pipeline::tell(shared_address(barrier), rank);
}

__device__ __forceinline__ void wait_for_cluster(uint64_t* barrier, unsigned parity) {
  wgmma_pipeline::wait_for_cluster(shared_address(barrier), parity);
}

}  // namespace cluster_memory
