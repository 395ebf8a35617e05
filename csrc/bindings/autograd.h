// Autograd's side of the ops: none has a backward.
#pragma once

#include <torch/library.h>

namespace paged_kv::bindings {

// What to register for the Autograd key of an op: a backward that raises.
torch::CppFunction no_backward(const c10::FunctionSchema& schema);

}  // namespace paged_kv::bindings
