// Blocks copied within each of many tensors, in one launch: the tensors' layouts travel as kernel parameters, so that
// nothing has to be staged in device memory. Grid: (pair of blocks, part of a block, tensor).
#include <algorithm>

#include "elements.cuh"
#include "fast_divide.cuh"
#include "kernels.h"
#include "launch.cuh"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kAccessesPerThread = 8;  // to hide latency, while a 32 KiB block is still one part
constexpr int kMaxTensors = 256;       // what fits in 32 KiB, the limit of a kernel's parameters

// BlockedBytes, ready for division: a block is `num_accesses` accesses of `access_bytes`.
struct TensorLayout {
  char* data;
  int64_t stride_block_bytes;
  int64_t stride_bytes[BlockedBytes::kMaxDims];
  FastDivide size[BlockedBytes::kMaxDims];
  FastDivide accesses_per_piece;
  uint32_t num_accesses;
  int16_t num_dims, access_bytes;
};

struct CopyParams {
  const int64_t* block_mapping;  // [num_pairs, 2]
  TensorLayout tensors[kMaxTensors];
};
static_assert(sizeof(CopyParams) <= 32764, "the limit of a kernel's parameters");

__device__ int64_t offset_of_access(const TensorLayout& t, uint32_t access) {
  uint32_t in_piece;
  uint32_t piece = t.accesses_per_piece.divide(access, in_piece);
  int64_t offset = int64_t{in_piece} * t.access_bytes;
#pragma unroll
  for (int dim = BlockedBytes::kMaxDims - 1; dim >= 0; --dim) {
    if (dim >= t.num_dims) continue;
    uint32_t index;
    piece = t.size[dim].divide(piece, index);
    offset += index * t.stride_bytes[dim];
  }
  return offset;
}

template <class Piece>
__device__ void copy_part(const TensorLayout& t, int64_t source, int64_t destination) {
  const char* from = t.data + source * t.stride_block_bytes;
  char* to = t.data + destination * t.stride_block_bytes;
  const uint32_t begin = blockIdx.y * kThreads * kAccessesPerThread + threadIdx.x;
#pragma unroll
  for (int i = 0; i < kAccessesPerThread; ++i) {
    const uint32_t access = begin + i * kThreads;
    if (access >= t.num_accesses) break;
    const int64_t offset = offset_of_access(t, access);
    store_pack<1>(reinterpret_cast<Piece*>(to + offset), load_pack<1>(reinterpret_cast<const Piece*>(from + offset)));
  }
}

__global__ void __launch_bounds__(kThreads) copy_blocks_kernel(const __grid_constant__ CopyParams p) {
  const TensorLayout& tensor = p.tensors[blockIdx.z];
  const int64_t source = p.block_mapping[2 * int64_t{blockIdx.x}];
  const int64_t destination = p.block_mapping[2 * int64_t{blockIdx.x} + 1];
  switch (tensor.access_bytes) {
    case 16:
      return copy_part<uint4>(tensor, source, destination);
    case 4:
      return copy_part<uint32_t>(tensor, source, destination);
    default:
      return copy_part<uint8_t>(tensor, source, destination);
  }
}

TensorLayout layout_of(const BlockedBytes& t) {
  int access = 16;
  auto divides = [&] {
    bool all = t.inner_bytes % access == 0 && is_aligned(t.data, access, 1, t.stride_block_bytes);
    for (int dim = 0; dim < t.num_dims; ++dim) all = all && t.stride_bytes[dim] % access == 0;
    return all;
  };
  while (access > 1 && !divides()) access = access == 16 ? 4 : 1;
  TensorLayout layout{};
  layout.data = t.data;
  layout.stride_block_bytes = t.stride_block_bytes;
  layout.accesses_per_piece = FastDivide(static_cast<uint32_t>(t.inner_bytes / access));
  layout.num_accesses = static_cast<uint32_t>(t.inner_bytes / access);
  layout.num_dims = static_cast<int16_t>(t.num_dims);
  layout.access_bytes = static_cast<int16_t>(access);
  for (int dim = 0; dim < t.num_dims; ++dim) {
    layout.stride_bytes[dim] = t.stride_bytes[dim];
    layout.size[dim] = FastDivide(static_cast<uint32_t>(t.size[dim]));
    layout.num_accesses *= static_cast<uint32_t>(t.size[dim]);
  }
  return layout;
}

}  // namespace

Error copy_blocks(const CopyBlocksParams& p, const Context& context) {
  if (p.num_pairs == 0) return nullptr;
  for (int64_t first = 0; first < p.num_tensors; first += kMaxTensors) {
    const int64_t count = std::min<int64_t>(kMaxTensors, p.num_tensors - first);
    CopyParams params;
    params.block_mapping = p.block_mapping;
    uint32_t longest = 0;
    for (int64_t i = 0; i < count; ++i) {
      params.tensors[i] = layout_of(p.tensors[first + i]);
      longest = std::max(longest, params.tensors[i].num_accesses);
    }
    if (longest == 0) continue;
    const dim3 grid(static_cast<unsigned>(p.num_pairs), ceil_divide<uint32_t>(longest, kThreads * kAccessesPerThread),
                    static_cast<unsigned>(count));
    if (Error error = launch(copy_blocks_kernel, grid, kThreads, 0, context, params)) return error;
  }
  return nullptr;
}

}  // namespace paged_kv::cuda
