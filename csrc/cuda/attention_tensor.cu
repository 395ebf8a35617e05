#include "attention.cuh"
namespace paged_kv::cuda { const AttentionKernel* tensor_core_kernel(const AttentionParams&) { return nullptr; } }
