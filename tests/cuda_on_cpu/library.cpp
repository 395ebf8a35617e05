// torch.ops.paged_kv_cuda_on_cpu: the ops of paged_kv over the CUDA backend's table, whose kernels run on fibers. Same
// schemas, same checks, tensors on the CPU. The build gives the namespace's name, so that two builds fit in one
// process.
#include <ATen/ops/empty.h>

#include <cstdlib>
#include <cstring>

#include "bindings/ops.h"
#include "cuda/kernels.h"

namespace paged_kv::bindings {
namespace {

// 0xff bytes, so that a partial result that nobody wrote is NaN.
void* allocate(size_t bytes, void*) {
  void* memory = std::malloc(bytes);
  if (memory != nullptr) std::memset(memory, 0xff, bytes);
  return memory;
}
void release(void* memory, void*) { std::free(memory); }

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) { return at::empty(sizes, options); }

Context context(c10::Device) { return {nullptr, 1, nullptr, allocate, release}; }

}  // namespace

TORCH_LIBRARY(PAGED_KV_NAMESPACE, library) { define_ops(library); }

TORCH_LIBRARY_IMPL(PAGED_KV_NAMESPACE, CPU, library) {
  register_backend(
      library, {.backend = cuda::backend, .context = context, .empty = empty, .checks_values = checks_values_on_cuda});
}

}  // namespace paged_kv::bindings
