// The one way to launch a kernel and to ask for workspace.
#pragma once

#include <cuda_runtime.h>

#include "backend.h"

namespace paged_kv::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffu;
inline constexpr int kWarpSize = 32;

// What a kernel may have without opting in.
inline constexpr size_t kDefaultSharedBytes = 48 << 10;

inline Error to_error(cudaError_t status) {
  if (status == cudaSuccess) return nullptr;
  cudaGetLastError();  // reported here; a later launch must not report it again
  if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction) {
    return "paged_kv was built without kernels for this GPU's architecture; see paged_kv.build_info() for those it "
           "has, "
           "and rebuild with TORCH_CUDA_ARCH_LIST";
  }
  return cudaGetErrorString(status);
}

template <class... Params>
Error launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes, const Context& context,
             const Params&... params) {
  if (shared_bytes > kDefaultSharedBytes) {
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (status != cudaSuccess) return to_error(status);
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(context.stream);
  return to_error(cudaLaunchKernelEx(&config, kernel, params...));
}

// Device memory for one op; released, in the order of the stream, when the launcher returns.
class Workspace {
 public:
  Workspace(size_t bytes, const Context& context)
      : context_(context), memory_(bytes == 0 ? nullptr : context.allocate(bytes, context.stream)) {}
  ~Workspace() {
    if (memory_ != nullptr) context_.release(memory_, context_.stream);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* get() const { return memory_; }

 private:
  const Context& context_;
  void* memory_;
};

template <class Int>
constexpr Int ceil_divide(Int a, Int b) {
  return (a + b - 1) / b;
}

}  // namespace paged_kv::cuda
