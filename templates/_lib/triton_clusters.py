{% include "_lib/triton_cuda.py" %}


# ---- rows that the blocks of a cluster hold in shared memory, by CUDA C++ ----

cuda_code = CudaCode(
    r"""
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

{% include "_lib/wgmma_pipeline.cuh" %}

{% include "_lib/cluster_memory.cuh" %}

{{ rows_kernels }}
""",
    ["-std=c++17", "-O3", "-gencode=arch=compute_90a,code=sm_90a"],
)
