#include "bindings/overlap.h"

#include <algorithm>

namespace paged_kv::bindings {
namespace {

using DimsRef = c10::ArrayRef<Dim<1>>;

// Bytes from the first to one past the last.
int64_t span(DimsRef dims, int64_t run) {
  for (const auto& dim : dims) run += (dim.size - 1) * dim.stride[0];
  return run;
}

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// Whether box A at address 0 and box B at address `shift` share a byte. Where both repeat with the same stride, only
// the difference k of the two indices matters, and few k bring the rest into reach: constant work for caches cut from
// one buffer. Else the dim of the larger stride is walked, over the indices in reach alone.
bool share(DimsRef a, int64_t run_a, DimsRef b, int64_t run_b, int64_t shift) {
  if (shift >= span(a, run_a) || shift + span(b, run_b) <= 0) return false;
  if (a.empty() && b.empty()) return true;
  const int64_t stride_a = a.empty() ? 0 : a[0].stride[0];
  const int64_t stride_b = b.empty() ? 0 : b[0].stride[0];
  const int64_t stride = std::max(stride_a, stride_b);
  const bool walk_a = stride_a == stride, walk_b = stride_b == stride;
  const DimsRef rest_a = walk_a ? a.slice(1) : a, rest_b = walk_b ? b.slice(1) : b;

  // A's index minus B's. In reach: k * stride < shift + span(rest_b) and k * stride + span(rest_a) > shift.
  const int64_t first = std::max(walk_b ? 1 - b[0].size : 0, floor_div(shift - span(rest_a, run_a), stride) + 1);
  const int64_t last = std::min(walk_a ? a[0].size - 1 : 0, floor_div(shift + span(rest_b, run_b) - 1, stride));
  for (int64_t k = first; k <= last; ++k) {
    if (share(rest_a, run_a, rest_b, run_b, shift - k * stride)) return true;
  }
  return false;
}

bool overlaps_itself(DimsRef dims, int64_t run) {
  if (dims.empty()) return false;
  const DimsRef rest = dims.slice(1);
  const int64_t reach = span(rest, run);
  for (int64_t k = 1; k < dims[0].size && k * dims[0].stride[0] < reach; ++k) {
    if (share(rest, run, rest, run, k * dims[0].stride[0])) return true;
  }
  return overlaps_itself(rest, run);
}

}  // namespace

ByteBox::ByteBox(const at::Tensor& tensor) {
  begin = end = reinterpret_cast<int64_t>(tensor.const_data_ptr());
  if (tensor.numel() == 0) return;
  run = static_cast<int64_t>(tensor.element_size());
  if (tensor.is_contiguous()) {  // most are; sorting the dims of eight tensors takes 1 us
    run *= tensor.numel();
    end = begin + run;
    return;
  }
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    const int64_t size = tensor.size(d), stride = tensor.stride(d) * run;
    if (size > 1 && stride > 0) dims.push_back({size, {stride}});
    repeats |= size > 1 && stride == 0;
  }
  run = join_dims(dims, run);
  end = begin + span(dims, run);
}

bool share_bytes(const ByteBox& a, const ByteBox& b) {
  if (a.begin >= b.end || b.begin >= a.end || a.begin == a.end || b.begin == b.end) return false;
  return share(a.dims, a.run, b.dims, b.run, b.begin - a.begin);
}

bool overlaps_itself(const ByteBox& box) { return box.repeats || overlaps_itself(box.dims, box.run); }

}  // namespace paged_kv::bindings
