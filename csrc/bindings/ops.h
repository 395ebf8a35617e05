// The ops' schemas and their implementation over any backend. cpu.cpp puts the two together for torch.ops.paged_kv; a
// library with another name and another table gets the same ops, the same checks and the same errors.
#pragma once

#include <c10/core/Device.h>
#include <torch/library.h>

#include "backend.h"

namespace paged_kv::bindings {

// What a device gives to the ops; each function is asked once a call.
struct DeviceInterface {
  const Backend& (*backend)();
  Context (*context)(c10::Device device);
  at::Tensor (*empty)(at::IntArrayRef sizes, const at::TensorOptions& options);  // what ops return
  // Whether to check the values in index tensors and scales: on a GPU that waits for the device.
  bool (*checks_values)();
};

// The checking mode: PAGED_KV_CUDA_CHECKS=1 in the environment checks ids, lengths and scales on a GPU as on the CPU,
// for which each call waits for the device and copies its index tensors to the host. Not capturable in a CUDA graph.
bool checks_values_on_cuda();

// Defines every schema, and that backward raises.
void define_ops(torch::Library& library);

// Implements every op (register_*_ops: those of one source file), for the dispatch key that `library` was opened with.
void register_backend(torch::Library& library, const DeviceInterface& device);
void register_attention_ops(torch::Library& library, const DeviceInterface& device);
void register_cache_ops(torch::Library& library, const DeviceInterface& device);

}  // namespace paged_kv::bindings
