// Dims of strided tensors, brought into order and joined where they continue one another, so that what is left says how
// the bytes really lie.
#pragma once

#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace paged_kv::bindings {

// One dim of kTensors tensors of equal shape.
template <size_t kTensors>
struct Dim {
  int64_t size;
  std::array<int64_t, kTensors> stride;  // in bytes
};
template <size_t kTensors>
using Dims = c10::SmallVector<Dim<kTensors>, 5>;

// Sorts dims by the last tensor's stride, the largest first, and joins neighbours that continue one another in every
// tensor. Returns the length of the contiguous run that is left of the innermost dims and an element, which start as
// `run` bytes. Dims of size 1 are expected to be left out.
template <size_t kTensors>
int64_t join_dims(Dims<kTensors>& dims, int64_t run) {
  std::stable_sort(dims.begin(), dims.end(),
                   [](const auto& a, const auto& b) { return a.stride.back() > b.stride.back(); });
  const auto continues = [](const Dim<kTensors>& outer, int64_t size, const std::array<int64_t, kTensors>& stride) {
    for (size_t t = 0; t < kTensors; ++t) {
      if (outer.stride[t] != size * stride[t]) return false;
    }
    return true;
  };
  std::array<int64_t, kTensors> unit;
  unit.fill(1);
  while (!dims.empty() && continues(dims.back(), run, unit)) run *= dims.pop_back_val().size;
  for (size_t d = dims.size(); d-- > 1;) {
    Dim<kTensors>&outer = dims[d - 1], &inner = dims[d];
    if (continues(outer, inner.size, inner.stride)) {
      outer = {outer.size * inner.size, inner.stride};
      dims.erase(&inner);
    }
  }
  return run;
}

}  // namespace paged_kv::bindings
