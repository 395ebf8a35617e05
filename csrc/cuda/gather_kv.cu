// Keys and values of all sequences, one after another. A warp gathers all heads of one token: it finds the token's
// sequence by scanning seq_lens, so that no one has to bring prefix sums to the device.
#include "dispatch.h"
#include "elements.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "page_table.cuh"
#include "prefix_search.cuh"
#include "views.cuh"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarpSize;

// From: elements of the cache in packs of kPack; To: float, with scales applied, or From, bit for bit.
template <class From, class To, int kPack>
__device__ void gather_rows(const GatherKvParams& p, const FastDivide& packs_per_row, const CacheView& cache,
                            const ScaleView& scale, const RowsView& rows, int64_t block, int64_t slot, int64_t token,
                            int lane) {
  const uint32_t num_packs = static_cast<uint32_t>(p.num_kv_heads) * packs_per_row.divisor;
  for (uint32_t i = lane; i < num_packs; i += kWarpSize) {
    uint32_t pack_in_row;
    const uint32_t head = packs_per_row.divide(i, pack_in_row);
    const auto from = load_pack<kPack>(cache_row<const From>(cache, block, head, slot) + pack_in_row * kPack);
    Pack<To, kPack> to;
    if constexpr (std::is_same_v<From, To>) {
      to = from;
    } else {
      const float factor = read_scale(scale, block, head, slot);
      for (int e = 0; e < kPack; ++e) to.element[e] = to_float(from.element[e]) * factor;
    }
    store_pack(token_row<To>(rows, token, head) + pack_in_row * kPack, to);
  }
}

template <class Piece, bool kDequantise, int kPack>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const __grid_constant__ GatherKvParams p, FastDivide block_size, FastDivide packs_per_row) {
  const int64_t token = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  if (token >= p.num_tokens) return;
  const RunPosition at = find_run(p.num_seqs, token, lane, [&](int64_t seq) { return p.seq_lens[seq]; });
  if (at.run < 0) return;
  const PageTable table(p.block_tables + at.run * p.table_stride_seq, p.table_stride_block, block_size);
  const Page page = table.locate(static_cast<uint32_t>(at.offset));
  auto gather = [&](auto from, auto to) {
    using From = decltype(from);
    using To = decltype(to);
    gather_rows<From, To, kPack>(p, packs_per_row, p.key_cache, p.k_scale, p.key, page.block, page.slot, token, lane);
    gather_rows<From, To, kPack>(p, packs_per_row, p.value_cache, p.v_scale, p.value, page.block, page.slot, token,
                                 lane);
  };
  if constexpr (kDequantise) {
    with_quantised(p.key_cache.dtype, [&](auto quantised) { gather(quantised, float{}); });
  } else {
    gather(Piece{}, Piece{});
  }
}

bool packs_aligned(const CacheView& cache, const RowsView& rows, int64_t head_dim, int64_t pack) {
  const int64_t from = element_size(cache.dtype), to = element_size(rows.dtype);
  return head_dim % pack == 0 &&
         is_aligned(cache.data, pack * from, from, cache.stride_block, cache.stride_head, cache.stride_slot) &&
         is_aligned(rows.data, pack * to, to, rows.stride_token, rows.stride_head);
}

template <class Piece, bool kDequantise, int kPack>
Error gather(const GatherKvParams& p, const Context& context) {
  const unsigned grid = static_cast<unsigned>(ceil_divide<int64_t>(p.num_tokens, kWarps));
  return launch(gather_kernel<Piece, kDequantise, kPack>, grid, kThreads, 0, context, p,
                FastDivide(static_cast<uint32_t>(p.block_size)), FastDivide(static_cast<uint32_t>(p.head_dim / kPack)));
}

template <class Piece>
Error gather_bits(const GatherKvParams& p, const Context& context) {
  constexpr int kPack = 16 / sizeof(Piece);
  const bool vectorised =
      packs_aligned(p.key_cache, p.key, p.head_dim, kPack) && packs_aligned(p.value_cache, p.value, p.head_dim, kPack);
  return vectorised ? gather<Piece, false, kPack>(p, context) : gather<Piece, false, 1>(p, context);
}

}  // namespace

Error gather_kv(const GatherKvParams& p, const Context& context) {
  if (p.num_tokens == 0) return nullptr;
  if (p.dequantise) {
    constexpr int kPack = 4;
    const bool vectorised = packs_aligned(p.key_cache, p.key, p.head_dim, kPack) &&
                            packs_aligned(p.value_cache, p.value, p.head_dim, kPack);
    return vectorised ? gather<uint8_t, true, kPack>(p, context) : gather<uint8_t, true, 1>(p, context);
  }
  switch (element_size(p.key_cache.dtype)) {
    case 4:
      return gather_bits<uint32_t>(p, context);
    case 2:
      return gather_bits<uint16_t>(p, context);
    default:
      return gather_bits<uint8_t>(p, context);
  }
}

}  // namespace paged_kv::cuda
