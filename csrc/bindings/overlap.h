// Which bytes a strided tensor covers, and whether two tensors share one. Exact: interleaved views of one buffer (keys
// and values of a cache [N, 2, ...], say) cover overlapping ranges of addresses without sharing an element.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "bindings/strides.h"

namespace paged_kv::bindings {

// The bytes of a tensor: a run of `run` contiguous bytes, repeated along dims with strides in bytes, the largest first.
// Dims of size 1 and of stride 0 are left out, neighbouring dims joined; `repeats` tells whether a dim of stride 0 and
// more than one element was there.
struct ByteBox {
  explicit ByteBox(const at::Tensor& tensor);

  int64_t begin = 0;  // address of the first byte
  int64_t end = 0;    // one past the last; begin == end where there is no element
  int64_t run = 0;
  bool repeats = false;
  Dims<1> dims;
};

// Whether a byte belongs to both.
bool share_bytes(const ByteBox& a, const ByteBox& b);

// Whether two different elements of the tensor lie at one address, so that writing the tensor writes a byte twice.
bool overlaps_itself(const ByteBox& box);

}  // namespace paged_kv::bindings
