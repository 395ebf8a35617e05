// copy_blocks and swap_blocks: whole blocks moved as bytes, so that any dtype and layout is copied bit for bit.
// A block is a set of contiguous pieces (BlockedBytes). Where a tensor's next block starts right behind the last one,
// piece by piece, runs of neighbours in the block mapping are copied as one.
#include <algorithm>

#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/streaming.h"

namespace paged_kv::cpu {
namespace {

// Bytes worth waking a thread for: memcpy moves them in about the time that a wake-up takes (10 us).
constexpr int64_t kGrainBytes = 64 << 10;

int64_t bytes_per_block(const BlockedBytes& t) {
  int64_t bytes = t.inner_bytes;
  for (int dim = 0; dim < t.num_dims; ++dim) bytes *= t.size[dim];
  return bytes;
}

bool neighbours_touch(const BlockedBytes& t) { return t.stride_block_bytes == t.inner_bytes; }

// Copies `bytes` at every position of the outer dimensions from kDim on.
template <bool kStream, int kDim = 0>
void copy_pieces(const BlockedBytes& from, const char* src, const BlockedBytes& to, char* dst, int64_t bytes) {
  if constexpr (kDim < BlockedBytes::kMaxDims) {
    if (kDim < from.num_dims) {
      for (int64_t i = 0; i < from.size[kDim]; ++i) {
        copy_pieces<kStream, kDim + 1>(from, src + i * from.stride_bytes[kDim], to, dst + i * to.stride_bytes[kDim],
                                       bytes);
      }
      return;
    }
  }
  copy_bytes<kStream>(dst, src, bytes);
}

// Copies pairs [begin, end) of block_mapping [num_pairs, 2], runs of neighbours joined.
template <bool kStream>
void copy_pairs(const BlockedBytes& from, const BlockedBytes& to, const int64_t* block_mapping, int64_t begin,
                int64_t end) {
  const bool join = neighbours_touch(from) && neighbours_touch(to);
  while (begin < end) {
    const int64_t source = block_mapping[2 * begin], destination = block_mapping[2 * begin + 1];
    int64_t run = 1;
    while (join && begin + run < end && block_mapping[2 * (begin + run)] == source + run &&
           block_mapping[2 * (begin + run) + 1] == destination + run) {
      ++run;
    }
    copy_pieces<kStream>(from, from.data + source * from.stride_block_bytes, to,
                         to.data + destination * to.stride_block_bytes, run * from.inner_bytes);
    begin += run;
  }
}

int64_t grain(int64_t bytes_per_pair) {
  return std::max<int64_t>(1, kGrainBytes / std::max<int64_t>(1, bytes_per_pair));
}

template <bool kStream>
void copy_within_tensors(const CopyBlocksParams& p, int64_t begin, int64_t end) {
  while (begin < end) {
    const BlockedBytes& tensor = p.tensors[begin / p.num_pairs];
    const int64_t first = begin % p.num_pairs;
    const int64_t last = std::min(p.num_pairs, first + (end - begin));
    copy_pairs<kStream>(tensor, tensor, p.block_mapping, first, last);
    begin += last - first;
  }
  finish_streaming();
}

}  // namespace

Error copy_blocks(const CopyBlocksParams& p, const Context& context) {
  int64_t bytes = 0;
  for (int64_t i = 0; i < p.num_tensors; ++i) bytes += bytes_per_block(p.tensors[i]);
  const int64_t units = p.num_tensors * p.num_pairs;  // one tensor's part of one pair, pairs of a tensor in a row
  if (units == 0) return nullptr;
  const auto copy = exceeds_caches(bytes * p.num_pairs) ? copy_within_tensors<true> : copy_within_tensors<false>;
  parallel_for(context, units, grain(bytes / p.num_tensors), [&](int64_t begin, int64_t end) { copy(p, begin, end); });
  return nullptr;
}

// Always past the caches: this is one of many tensors, and before its blocks are read the others are swapped too.
Error swap_blocks(const SwapBlocksParams& p, const Context& context) {
  parallel_for(context, p.num_pairs, grain(bytes_per_block(p.src)), [&](int64_t begin, int64_t end) {
    copy_pairs<true>(p.src, p.dst, p.block_mapping, begin, end);
    finish_streaming();
  });
  return nullptr;
}

}  // namespace paged_kv::cpu
