// Autograd's side of the ops: none has a backward.
#pragma once

#include <torch/library.h>

namespace paged_kv::bindings {

// What to register for the Autograd key of every op: a backward that raises.
torch::CppFunction no_backward();

}  // namespace paged_kv::bindings
