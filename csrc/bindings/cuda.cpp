// torch.ops.paged_kv on CUDA: each call on the current stream of its tensors' device, with PyTorch's memory.
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>

#include "bindings/ops.h"
#include "cuda/kernels.h"

namespace paged_kv::bindings {
namespace {

void* allocate(size_t bytes, void* stream) {
  return c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(bytes, static_cast<cudaStream_t>(stream));
}

// At once, while the stream may still use it: the allocator hands it out again to the same stream only.
void release(void* memory, void*) { c10::cuda::CUDACachingAllocator::raw_delete(memory); }

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }

Context context(c10::Device device) {
  return {nullptr, 1, c10::cuda::getCurrentCUDAStream(device.index()).stream(), allocate, release};
}

}  // namespace

TORCH_LIBRARY_IMPL(paged_kv, CUDA, library) {
  register_backend(
      library, {.backend = cuda::backend, .context = context, .empty = empty, .checks_values = checks_values_on_cuda});
}

}  // namespace paged_kv::bindings
