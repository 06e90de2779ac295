// Descriptors of row-major matrices for the bulk tensor copy engine, made on the host.
//
// The encoder belongs to the driver's library; it is asked for at run time, so that nothing
// links against that library.
namespace wgmma_tensor_map {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*,
                            const cuuint64_t*, const cuuint64_t*, const cuuint32_t*,
                            const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

inline Encode encoder() {
  static const Encode found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion(
        "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
    const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_found ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  return found;
}

// Makes a descriptor of what the encoder is given. In a thread that has asked nothing of the device
// yet it refuses anything, for want of a context: then it is asked again in the device's own.
// Returns nullptr when fine.
template <class... Given>
inline const char* encoded(CUtensorMap* map, Given... given) {
  const Encode encode = encoder();
  if (encode == nullptr) return "the driver has no cuTensorMapEncodeTiled";
  if (encode(map, given...) == CUDA_SUCCESS) return nullptr;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaSetDevice(device);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  const CUresult result = encode(map, given...);
  if (result == CUDA_SUCCESS) return nullptr;
  thread_local char message[64];
  snprintf(message, sizeof message, "cuTensorMapEncodeTiled refused it with code %d", int(result));
  return message;
}

// Boxes of `box_rows` rows times `box_columns` elements, swizzled over the bytes of a box's row
// (32, 64 or 128). What lies outside the matrix is read as zero. Returns nullptr when fine.
inline const char* describe(CUtensorMap* map, CUtensorMapDataType type, int element_bytes,
                            const void* data, int64_t rows, int64_t columns, int64_t pitch_bytes,
                            int box_rows, int box_columns) {
  const int row_bytes = box_columns * element_bytes;
  const CUtensorMapSwizzle swizzle = row_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : row_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                       : CU_TENSOR_MAP_SWIZZLE_32B;
  const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)};
  const cuuint64_t pitches[1] = {cuuint64_t(pitch_bytes)};
  const cuuint32_t box[2] = {cuuint32_t(box_columns), cuuint32_t(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  return encoded(map, type, 2, const_cast<void*>(data), sizes, pitches, box, steps,
                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace wgmma_tensor_map
