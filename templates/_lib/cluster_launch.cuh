// How a kernel of `cluster_rows.cuh` is started.
namespace {{ cluster_space }} {

// Starts clusters of blocks, no more than there is room for at a time; of each kernel by itself.
template <auto kernel, class... Arguments>
static const char* start(int64_t rows, void* stream, Arguments... arguments) {
  constexpr int kMostDevices = 64;
  static int fitting[kMostDevices] = {};  // clusters at a time
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  if (rows <= 0) return nullptr;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {kBlocks, 1, 1};
  config.attrs = &attribute;
  config.numAttrs = 1;
  if (device >= kMostDevices) return "more devices than this kernel counts";
  if (fitting[device] == 0) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kSharedBytes);
    if (error == cudaSuccess && kBlocks > 8) {
      error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    }
    int clusters = 0;
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess) return cudaGetErrorString(error);
    if (clusters < 1) return "no cluster of so many blocks fits on this device";
    fitting[device] = clusters;
  }
  config.gridDim = dim3(unsigned(kBlocks * (rows < fitting[device] ? rows : fitting[device])));
  error = cudaLaunchKernelEx(&config, kernel, arguments...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

}  // namespace {{ cluster_space }}
