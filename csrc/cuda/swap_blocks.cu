// Blocks copied between two buffers, host memory included, by the copy engines: one copy for a run of neighbours.
// Queued on the stream; with pinned host memory the host does not wait. No staging buffer, so none can be reused too
// early.
#include <algorithm>

#include "kernels.h"
#include "launch.cuh"

namespace paged_kv::cuda {
namespace {

// Copies `count` blocks from `source` to `destination`, each as pieces that lie `stride_block_bytes` after those of the
// block before, so that a run of blocks is one rectangle of `count` rows for each piece.
template <int kDim = 0>
cudaError_t copy_pieces(const SwapBlocksParams& p, const char* source, char* destination, int64_t count,
                        cudaStream_t stream) {
  if constexpr (kDim < BlockedBytes::kMaxDims) {
    if (kDim < p.src.num_dims) {
      for (int64_t i = 0; i < p.src.size[kDim]; ++i) {
        const cudaError_t status = copy_pieces<kDim + 1>(p, source + i * p.src.stride_bytes[kDim],
                                                         destination + i * p.dst.stride_bytes[kDim], count, stream);
        if (status != cudaSuccess) return status;
      }
      return cudaSuccess;
    }
  }
  const auto width = static_cast<size_t>(p.src.inner_bytes);
  if (count == 1 || (p.src.stride_block_bytes == p.src.inner_bytes && p.dst.stride_block_bytes == p.dst.inner_bytes)) {
    return cudaMemcpyAsync(destination, source, width * static_cast<size_t>(count), cudaMemcpyDefault, stream);
  }
  return cudaMemcpy2DAsync(destination, static_cast<size_t>(p.dst.stride_block_bytes), source,
                           static_cast<size_t>(p.src.stride_block_bytes), width, static_cast<size_t>(count),
                           cudaMemcpyDefault, stream);
}

// A rectangle's rows must not overlap and its pitch is at most 2 GiB.
bool can_join(const BlockedBytes& t) {
  return t.stride_block_bytes >= t.inner_bytes && t.stride_block_bytes < (int64_t{1} << 31);
}

}  // namespace

Error swap_blocks(const SwapBlocksParams& p, const Context& context) {
  const bool join = can_join(p.src) && can_join(p.dst);
  for (int64_t begin = 0, end; begin < p.num_pairs; begin = end) {
    const int64_t source = p.block_mapping[2 * begin], destination = p.block_mapping[2 * begin + 1];
    for (end = begin + 1; join && end < p.num_pairs; ++end) {
      if (p.block_mapping[2 * end] != source + end - begin) break;
      if (p.block_mapping[2 * end + 1] != destination + end - begin) break;
    }
    const cudaError_t status = copy_pieces(p, p.src.data + source * p.src.stride_block_bytes,
                                           p.dst.data + destination * p.dst.stride_block_bytes, end - begin,
                                           static_cast<cudaStream_t>(context.stream));
    if (status != cudaSuccess) return to_error(status);
  }
  return nullptr;
}

}  // namespace paged_kv::cuda
