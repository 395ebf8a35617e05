// What every op is made of besides its checks: params views of tensors, and the call through the backend's table.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <initializer_list>
#include <optional>
#include <utility>

#include "backend.h"
#include "bindings/checks.h"
#include "bindings/ops.h"

namespace paged_kv::bindings {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Only written tensors are asked for a mutable pointer, so that torch keeps its lazy clones lazy.
inline void* data_of(const Tensor& t, bool written) {
  return written ? t.mutable_data_ptr() : const_cast<void*>(t.const_data_ptr());
}

inline CacheView cache_view(const Tensor& t, DType dtype, bool written = false) {
  return {data_of(t, written), dtype, t.stride(0), t.stride(1), t.stride(2)};
}

inline RowsView rows_view(const Tensor& t, DType dtype, bool written = false) {
  return {data_of(t, written), dtype, t.stride(0), t.stride(1)};
}

inline ScaleView scale_view(const MaybeTensor& scale, bool written = false) {
  if (!scale) return {nullptr, 0, 0, 0};
  float* data = static_cast<float*>(data_of(*scale, written));
  if (scale->dim() == 3) return {data, scale->stride(0), scale->stride(1), scale->stride(2)};
  return {data, 0, scale->size(0) == 1 ? 0 : scale->stride(0), 0};
}

inline const float* floats(const MaybeTensor& t) { return t ? t->const_data_ptr<float>() : nullptr; }

// Values that the checks read, in host memory.
inline Tensor on_host(const Tensor& t) { return t.is_cpu() ? t : t.cpu(); }

inline Args present(std::initializer_list<std::pair<const char*, const MaybeTensor*>> optional_args) {
  Args args;
  for (const auto& [name, tensor] : optional_args) {
    if (*tensor) args.emplace_back(name, **tensor);
  }
  return args;
}

// Kernels write behind autograd's back: this is what makes a tensor saved for backward notice.
inline void mark_written(at::ArrayRef<Arg> written) {
  for (const Arg& arg : written) {
    if (!arg->is_inference()) arg->unsafeGetTensorImpl()->bump_version();
  }
}

// Throws what a kernel returns, with the sizes of its main arguments.
template <typename Params>
void call(const DeviceInterface& device, const Checks& checks,
          Error (*const Backend::*kernel)(const Params&, const Context&), const Params& params,
          at::ArrayRef<Arg> written, Arg anchor) {
  const Backend& backend = device.backend();
  const c10::DeviceGuard guard(anchor->device());
  const Error error = (backend.*kernel)(params, device.context(anchor->device()));
  TORCH_CHECK(error == nullptr, "paged_kv::", checks.op(), ": backend ", backend.name, ": ", error, " (", anchor.name,
              " ", anchor->sizes(), ")");
  mark_written(written);
}

// An op as the dispatcher wants it: without the device, which it holds.
template <typename Result, typename... Arguments>
auto on_device(const DeviceInterface& device, Result (*op)(const DeviceInterface&, Arguments...)) {
  return [device, op](Arguments... arguments) -> Result { return op(device, std::forward<Arguments>(arguments)...); };
}

}  // namespace paged_kv::bindings
