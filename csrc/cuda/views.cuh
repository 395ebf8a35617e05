// Addresses of rows in caches and packed tensors, and the scale of a row in a quantised cache.
#pragma once

#include <cuda_runtime.h>

#include "params.h"

namespace paged_kv::cuda {

__device__ __forceinline__ float* scale_at(const ScaleView& scale, int64_t block, int64_t head, int64_t slot) {
  return scale.data + block * scale.stride_block + head * scale.stride_head + slot * scale.stride_slot;
}

__device__ __forceinline__ float read_scale(const ScaleView& scale, int64_t block, int64_t head, int64_t slot) {
  return scale.data == nullptr ? 1.0f : *scale_at(scale, block, head, slot);
}

template <class T>
__device__ __forceinline__ T* cache_row(const CacheView& cache, int64_t block, int64_t head, int64_t slot) {
  return static_cast<T*>(cache.data) + block * cache.stride_block + head * cache.stride_head + slot * cache.stride_slot;
}

template <class T>
__device__ __forceinline__ T* token_row(const RowsView& rows, int64_t token, int64_t head) {
  return static_cast<T*>(rows.data) + token * rows.stride_token + head * rows.stride_head;
}

}  // namespace paged_kv::cuda
