// New tokens written to their slots. Grid: one block a token. A row is the head_dim elements of one head of the key or
// the value; several lanes copy a row bit for bit, or a warp quantises it, with a scale given or computed.
#include <algorithm>
#include <bit>

#include "dispatch.h"
#include "elements.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "views.cuh"

namespace paged_kv::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpSize;
constexpr int kMaxHeadDim = 256;

// A token's slot, or nothing to do.
struct Slot {
  int64_t block, offset;
  bool is_skipped;
};

__device__ Slot slot_of_token(const ReshapeAndCacheParams& p, int64_t token) {
  const int64_t slot = p.slot_mapping[token];
  if (slot < 0) return {0, 0, true};
  const int64_t block = slot / p.block_size;
  return {block, slot - block * p.block_size, false};
}

// Row `row` of a token: keys first, then values.
struct Row {
  const RowsView& source;
  const CacheView& cache;
  const ScaleView& scale;
  int64_t head;
};

__device__ Row row_of_token(const ReshapeAndCacheParams& p, int64_t row) {
  if (row < p.num_kv_heads) return {p.key, p.key_cache, p.k_scale, row};
  return {p.value, p.value_cache, p.v_scale, row - p.num_kv_heads};
}

// `lanes_per_row`, a power of two, neighbouring threads copy a row in pieces of type Piece.
template <class Piece>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ ReshapeAndCacheParams p, int pieces_per_row, int lanes_per_row) {
  constexpr int kPieceBytes = sizeof(Piece);
  const int64_t token = blockIdx.x;
  const Slot slot = slot_of_token(p, token);
  if (slot.is_skipped) return;
  const int64_t element_bytes = element_size(p.key_cache.dtype);
  const int rows_per_pass = kThreads / lanes_per_row, lane = threadIdx.x % lanes_per_row;
  for (int64_t i = threadIdx.x / lanes_per_row; i < 2 * p.num_kv_heads; i += rows_per_pass) {
    const Row row = row_of_token(p, i);
    const char* from = static_cast<const char*>(row.source.data) +
                       (token * row.source.stride_token + row.head * row.source.stride_head) * element_bytes;
    char* to =
        static_cast<char*>(row.cache.data) +
        (slot.block * row.cache.stride_block + row.head * row.cache.stride_head + slot.offset * row.cache.stride_slot) *
            element_bytes;
    for (int piece = lane; piece < pieces_per_row; piece += lanes_per_row) {
      store_pack<1>(reinterpret_cast<Piece*>(to + piece * kPieceBytes),
                    load_pack<1>(reinterpret_cast<const Piece*>(from + piece * kPieceBytes)));
    }
  }
}

// The scale for a row whose largest finite magnitude is `largest`: so that it becomes the format's largest number.
__device__ float dynamic_scale(float largest, float format_largest) {
  constexpr float kSmallestScale = 0x1p-126f;  // below, float32 loses precision
  return largest == 0.0f ? 1.0f : fmaxf(__fdiv_rn(largest, format_largest), kSmallestScale);
}

template <class Quantised>
__device__ constexpr float format_largest() {
  return std::is_same_v<Quantised, Float8E4M3> ? 448.0f : std::is_same_v<Quantised, Float8E5M2> ? 57344.0f : 127.0f;
}

// A warp quantises a row: lanes hold packs of kPack neighbouring elements, all of the row in registers.
template <class T, int kPack>
__global__ void __launch_bounds__(kThreads) quantise_kernel(const __grid_constant__ ReshapeAndCacheParams p) {
  constexpr int kPacks = kMaxHeadDim / (kWarpSize * kPack);
  const int64_t token = blockIdx.x;
  const Slot slot = slot_of_token(p, token);
  if (slot.is_skipped) return;
  const int lane = threadIdx.x % kWarpSize;
  for (int64_t i = threadIdx.x / kWarpSize; i < 2 * p.num_kv_heads; i += kWarps) {
    const Row row = row_of_token(p, i);
    const T* from = token_row<const T>(row.source, token, row.head);
    Pack<T, kPack> packs[kPacks];
    float largest = 0.0f;
#pragma unroll
    for (int j = 0; j < kPacks; ++j) {
      const int d = (j * kWarpSize + lane) * kPack;
      if (d >= p.head_dim) continue;
      packs[j] = load_pack<kPack>(from + d);
      for (int e = 0; e < kPack; ++e) {
        const float magnitude = fabsf(to_float(packs[j].element[e]));
        if (magnitude < INFINITY) largest = fmaxf(largest, magnitude);
      }
    }
    if (p.dynamic) {
      for (int bits = kWarpSize / 2; bits > 0; bits /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, bits));
      }
    }
    with_quantised(p.key_cache.dtype, [&](auto quantised) {
      using Quantised = decltype(quantised);
      const float scale = p.dynamic ? dynamic_scale(largest, format_largest<Quantised>())
                                    : read_scale(row.scale, slot.block, row.head, slot.offset);
      if (p.dynamic && lane == 0) *scale_at(row.scale, slot.block, row.head, slot.offset) = scale;
      Quantised* to = cache_row<Quantised>(row.cache, slot.block, row.head, slot.offset);
#pragma unroll
      for (int j = 0; j < kPacks; ++j) {
        const int d = (j * kWarpSize + lane) * kPack;
        if (d >= p.head_dim) continue;
        Pack<Quantised, kPack> pack;
        for (int e = 0; e < kPack; ++e) {
          pack.element[e] = from_float<Quantised>(__fdiv_rn(to_float(packs[j].element[e]), scale));
        }
        store_pack(to + d, pack);
      }
    });
  }
}

int64_t access_bytes(const RowsView& rows, const CacheView& cache, int64_t head_dim) {
  const int64_t size = element_size(cache.dtype);
  for (int64_t bytes = 16; bytes > size; bytes /= 2) {
    if (head_dim * size % bytes == 0 && is_aligned(rows.data, bytes, size, rows.stride_token, rows.stride_head) &&
        is_aligned(cache.data, bytes, size, cache.stride_block, cache.stride_head, cache.stride_slot)) {
      return bytes;
    }
  }
  return size;
}

Error copy(const ReshapeAndCacheParams& p, const Context& context) {
  const int64_t bytes =
      std::min(access_bytes(p.key, p.key_cache, p.head_dim), access_bytes(p.value, p.value_cache, p.head_dim));
  const int pieces = static_cast<int>(p.head_dim * element_size(p.key_cache.dtype) / bytes);
  const int lanes = std::min<int>(kWarpSize, static_cast<int>(std::bit_ceil(static_cast<unsigned>(pieces))));
  auto with = [&](auto piece) {
    return launch(copy_kernel<decltype(piece)>, static_cast<unsigned>(p.num_tokens), kThreads, 0, context, p, pieces,
                  lanes);
  };
  switch (bytes) {
    case 16:
      return with(uint4{});
    case 8:
      return with(uint2{});
    case 4:
      return with(uint32_t{});
    case 2:
      return with(uint16_t{});
    default:
      return with(uint8_t{});
  }
}

template <class T>
Error quantise(const ReshapeAndCacheParams& p, const Context& context) {
  constexpr int kPack = 4;
  auto aligned = [&](const RowsView& rows, const CacheView& cache) {
    return is_aligned(rows.data, kPack * sizeof(T), sizeof(T), rows.stride_token, rows.stride_head) &&
           is_aligned(cache.data, kPack, 1, cache.stride_block, cache.stride_head, cache.stride_slot);
  };
  const bool vectorised = p.head_dim % kPack == 0 && aligned(p.key, p.key_cache) && aligned(p.value, p.value_cache);
  return launch(vectorised ? quantise_kernel<T, kPack> : quantise_kernel<T, 1>, static_cast<unsigned>(p.num_tokens),
                kThreads, 0, context, p);
}

}  // namespace

Error reshape_and_cache(const ReshapeAndCacheParams& p, const Context& context) {
  if (p.num_tokens == 0) return nullptr;
  if (p.key.dtype == p.key_cache.dtype && !p.dynamic) return copy(p, context);
  return dispatch_float(p.key.dtype, [&](auto type) { return quantise<Element<type()>>(p, context); });
}

}  // namespace paged_kv::cuda
