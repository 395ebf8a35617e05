// Threads for kernels: Context::parallel_for over any callable.
#pragma once

#include "backend.h"

namespace paged_kv::cpu {

// Calls body(begin, end) over [0, n) in pieces of at least `grain`, on the caller's threads; returns when all ran.
template <typename Body>
void parallel_for(const Context& context, int64_t n, int64_t grain, const Body& body) {
  context.parallel_for(
      n, grain, [](void* arg, int64_t begin, int64_t end) { (*static_cast<const Body*>(arg))(begin, end); },
      const_cast<Body*>(&body));
}

}  // namespace paged_kv::cpu
