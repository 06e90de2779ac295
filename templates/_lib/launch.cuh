// Kernels that follow each other on a stream. With `overlap`, each is launched while the one before
// it still runs (programmatic dependent launch, sm_90 and later): its blocks move in where those
// leave, and wait. The first of a chain is launched as usual: it may follow anybody's kernel.
//
// Every kernel of a chain calls await_previous(), in all threads of all blocks, before it writes
// anything and before it reads what others of the chain write. That is enough for what earlier
// ones wrote as well: they waited, too. What a call is given may be read before.

constexpr bool kOverlaps = {{ overlap | lower }};

// The next kernel may be launched; what it follows must have ended before this one goes on.
__device__ __forceinline__ void await_previous() {
  if constexpr (kOverlaps) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
  }
}

struct Shape {  // of a launch
  unsigned blocks;
  int threads;
  int smem_bytes;
  bool is_first = false;  // of its chain
  unsigned blocks_down = 1;  // the grid's second dimension
};

template <class... Parameters, class... Arguments>
static const char* launch(void (*kernel)(Parameters...), const Shape& shape, void* stream,
                          Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.blocks, shape.blocks_down);
  config.blockDim = dim3(unsigned(shape.threads));
  config.dynamicSmemBytes = size_t(shape.smem_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = kOverlaps && !shape.is_first ? 1 : 0;
  const cudaError_t error =
      cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

// Lets a kernel have so much dynamic shared memory, where it is more than any kernel may have.
template <class Kernel>
static const char* allow_memory(Kernel kernel, int smem_bytes) {
  if (smem_bytes + 1024 <= 48 * 1024) return nullptr;  // static buffers count as well
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, smem_bytes);
  if (error == cudaSuccess) return nullptr;
  cudaGetLastError();  // this error is told here; the next call shall not find it
  return cudaGetErrorString(error);
}
