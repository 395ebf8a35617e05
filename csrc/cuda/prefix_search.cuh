// Which of many runs, laid one after another, an index falls into; for grids that the host sizes without knowing the
// lengths.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.cuh"

namespace paged_kv::cuda {

struct RunPosition {
  int64_t run;     // negative: the index is beyond the last run
  int64_t offset;  // in the run
};

// All lanes of a warp call it alike; length(run) is asked once for each run up to the one found.
template <class Length>
__device__ RunPosition find_run(int64_t num_runs, int64_t index, int lane, Length length) {
  int64_t start = 0;  // of run `base`
  for (int64_t base = 0; base < num_runs; base += kWarpSize) {
    const int64_t own = base + lane < num_runs ? length(base + lane) : 0;
    int64_t end = own;
    for (int distance = 1; distance < kWarpSize; distance *= 2) {  // inclusive prefix sum over lanes
      const int64_t other = __shfl_up_sync(kAllLanes, end, distance);
      if (lane >= distance) end += other;
    }
    const unsigned beyond = __ballot_sync(kAllLanes, start + end > index);
    if (beyond != 0) {
      const int found = __ffs(static_cast<int>(beyond)) - 1;
      return {base + found, index - start - __shfl_sync(kAllLanes, end - own, found)};
    }
    start += __shfl_sync(kAllLanes, end, kWarpSize - 1);
  }
  return {-1, 0};
}

}  // namespace paged_kv::cuda
