// Attention on the ordinary arithmetic units, for everything that tensor cores cannot do: float32, any head size and
// any alignment. Float32 throughout. Lanes share the head's elements, so that a warp reads a key in one or few
// accesses; it takes kStep keys at once for all rows of the tile, which makes one score for each lane.
#include <type_traits>

#include "attention.cuh"
#include "dispatch.h"

namespace paged_kv::cuda {
namespace {

// The cache's elements where the dtype is known at run time only: fp8 or int8.
struct Quantised {
  uint8_t bits;
};

template <class Cache_, int kPack_, int kHeadDim_>
struct VectorTraits {
  using Cache = Cache_;
  static constexpr int kPack = kPack_;  // elements of one access
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kPacks = kHeadDim / (kWarpSize * kPack);  // of a lane
  static constexpr int kPerLane = kPacks * kPack;
  static constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
  static constexpr int kRows = 8;  // queries and sums of 8 rows with 256 elements fill 128 registers
  static constexpr int kStep = kWarpSize / kRows;
  static_assert(kRows * kStep == kWarpSize, "one score for each lane");
  struct SharedStorage {
    Work work;
    RowExchange<kWarps, kRows, kHeadDim> rows;
  };
};

// The element of the head that a lane's element e is.
template <class Traits>
__device__ int element_of_lane(int e, int lane) {
  return (e / Traits::kPack * kWarpSize + lane) * Traits::kPack + e % Traits::kPack;
}

// A lane's elements of one row, as float32; zeros beyond the head.
template <int kPack, int kPacks, class T>
__device__ void load_row(float (&to)[kPack * kPacks], const T* row, int64_t head_dim, int lane) {
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int d = (i * kWarpSize + lane) * kPack;
    Pack<T, kPack> pack{};
    if (d < head_dim) pack = load_pack<kPack>(row + d);
#pragma unroll
    for (int e = 0; e < kPack; ++e) to[i * kPack + e] = to_float(pack.element[e]);
  }
}

template <class Traits>
__device__ void load_cache_row(float (&to)[Traits::kPerLane], const AttentionLaunch& p, const CacheView& cache,
                               const Page& page, int kv_head, int lane) {
  auto load = [&](auto element) {
    using T = decltype(element);
    load_row<Traits::kPack, Traits::kPacks>(to, cache_row<const T>(cache, page.block, kv_head, page.slot), p.head_dim,
                                            lane);
  };
  if constexpr (std::is_same_v<typename Traits::Cache, Quantised>) {
    with_quantised(cache.dtype, load);
  } else {
    load(typename Traits::Cache{});
  }
}

template <class Traits>
__device__ void load_query_row(float (&to)[Traits::kPerLane], const AttentionLaunch& p, const Work& work, int row,
                               int lane) {
  const int64_t token = work.seq.first_token + work.token(p, row);
  auto load = [&](auto element) {
    using T = decltype(element);
    // One element an access: the query is read once, and its alignment then does not matter.
    const T* from = token_row<const T>(p.query, token, work.head(p, row));
#pragma unroll
    for (int e = 0; e < Traits::kPerLane; ++e) {
      const int d = element_of_lane<Traits>(e, lane);
      to[e] = d < p.head_dim ? to_float(from[d]) : 0.0f;
    }
  };
  with_float(p.query.dtype, load);
}

// Sums each of the first 2 * kHalf numbers over groups of as many lanes; lane i of a group gets the sum of number i.
// The count is a template's, so that the numbers stay in registers: nvcc leaves a loop over it as it is.
template <int kHalf>
__device__ float sum_by_lane(float (&numbers)[kWarpSize], int lane) {
  const bool upper = (lane & kHalf) != 0;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float kept = upper ? numbers[i + kHalf] : numbers[i];
    const float sent = upper ? numbers[i] : numbers[i + kHalf];
    numbers[i] = kept + __shfl_xor_sync(kAllLanes, sent, kHalf);
  }
  if constexpr (kHalf == 1) {
    return numbers[0];
  } else {
    return sum_by_lane<kHalf / 2>(numbers, lane);
  }
}

template <class Traits>
__device__ void attend(const AttentionLaunch& p, const Work& work,
                       RowExchange<Traits::kWarps, Traits::kRows, Traits::kHeadDim>& smem) {
  constexpr int kRows = Traits::kRows, kStep = Traits::kStep, kPerLane = Traits::kPerLane;
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const PageTable table = work.table(p);
  float query[kRows][kPerLane], out[kRows][kPerLane];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r < work.num_rows) load_query_row<Traits>(query[r], p, work, r, lane);
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) out[r][e] = 0.0f;
  }

  // This lane's score is that of row lane / kStep and key lane % kStep of the step.
  const Row row(p, work, lane / kStep);
  const bool row_exists = lane / kStep < work.num_rows;
  SoftmaxState state;                                     // d: this lane's share; a row's lanes have the same m
  const int first_step = work.first_key / kStep * kStep;  // at fixed positions, whatever the window hides
  for (int step = first_step + warp * kStep; step < work.end_key; step += Traits::kWarps * kStep) {
    Page pages[kStep] = {};
    float keys[kStep][kPerLane], values[kStep][kPerLane];
#pragma unroll
    for (int j = 0; j < kStep; ++j) {
      const int key = step + j;
      const bool is_seen = key >= work.first_key && key < work.end_key;
      if (is_seen) pages[j] = table.locate(static_cast<uint32_t>(key));
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) keys[j][e] = values[j][e] = 0.0f;
      if (is_seen) {
        load_cache_row<Traits>(keys[j], p, p.key_cache, pages[j], work.kv_head(), lane);
        load_cache_row<Traits>(values[j], p, p.value_cache, pages[j], work.kv_head(), lane);
      }
    }

    float products[kWarpSize];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        float sum = 0.0f;
        if (r < work.num_rows) {
#pragma unroll
          for (int e = 0; e < kPerLane; ++e) sum += query[r][e] * keys[j][e];
        }
        products[r * kStep + j] = sum;
      }
    }
    // 31 shuffles instead of 160.
    float product = __fmul_rn(sum_by_lane<kWarpSize / 2>(products, lane), p.scale);  // see finish_scores

    const int key = step + lane % kStep;
    const bool visible = row_exists && row.sees(p, key) && key >= work.first_key && key < work.end_key;
    float value_scale = 1.0f;
    if (std::is_same_v<typename Traits::Cache, Quantised> && visible) {
      const Page page = table.locate(static_cast<uint32_t>(key));
      product *= read_scale(p.k_scale, page.block, work.kv_head(), page.slot);
      value_scale = read_scale(p.v_scale, page.block, work.kv_head(), page.slot);
    }
    const float score = visible ? row.score(p, product, key) : -INFINITY;
    float largest = score;
    for (int bits = kStep / 2; bits > 0; bits /= 2) {
      largest = ptx::max_or_nan(largest, __shfl_xor_sync(kAllLanes, largest, bits));
    }
    const float rescale = state.raise(largest);
    const float weight = state.weight(score);
    state.d += weight;

    const float weight_of_value = weight * value_scale;
    const unsigned seen = __ballot_sync(kAllLanes, visible);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= work.num_rows) break;
      const float factor = __shfl_sync(kAllLanes, rescale, r * kStep);
#pragma unroll
      for (int e = 0; e < kPerLane; ++e) out[r][e] *= factor;
#pragma unroll
      for (int j = 0; j < kStep; ++j) {
        const float w = __shfl_sync(kAllLanes, weight_of_value, r * kStep + j);
        // By selection: a value that the row does not see may be NaN, which a weight of 0 would not silence.
        if ((seen >> (r * kStep + j) & 1) == 0) continue;
#pragma unroll
        for (int e = 0; e < kPerLane; ++e) out[r][e] += w * values[j][e];
      }
    }
  }

  for (int bits = kStep / 2; bits > 0; bits /= 2) state.d += __shfl_xor_sync(kAllLanes, state.d, bits);
  if (lane % kStep == 0) smem.state[warp][lane / kStep] = state;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int e = 0; e < kPerLane; ++e) {
      const int d = element_of_lane<Traits>(e, lane);
      if (d < Traits::kHeadDim) smem.out[warp][r][d] = out[r][e];
    }
  }
  __syncthreads();
  store_rows(p, work, smem, warp, Traits::kWarps, lane, false, [&](int row, int d) {
    using Cache = typename Traits::Cache;
    if constexpr (std::is_same_v<Cache, Quantised>) {
      return with_quantised(p.value_cache.dtype,
                            [&](auto element) { return sum_values_not_finite<decltype(element)>(p, work, row, d); });
    } else {
      return sum_values_not_finite<Cache>(p, work, row, d);
    }
  });
}

// kSharedBytes stands in the kernel's name for `make cuda-check`, which computes how many blocks fit.
template <class Traits, size_t kSharedBytes = sizeof(typename Traits::SharedStorage)>
__global__ void __launch_bounds__(Traits::kThreads) vector_kernel_of(const __grid_constant__ AttentionLaunch p) {
  auto& smem = ptx::dynamic_smem<typename Traits::SharedStorage>();
  for_each_tile(p, smem.work, [&] { attend<Traits>(p, smem.work, smem.rows); });
}

template <class Traits>
constexpr AttentionKernel kVectorKernel = {.split_rows = 16,
                                           .rows_per_tile = Traits::kRows,
                                           .launch = [](const AttentionLaunch& p, dim3 grid, const Context& context) {
                                             return launch(vector_kernel_of<Traits>, grid, Traits::kThreads,
                                                           sizeof(typename Traits::SharedStorage), context, p);
                                           }};

template <class Cache>
const AttentionKernel& kernel_for(const AttentionParams& p) {
  constexpr int kPack = 4;
  const int64_t size = element_size(p.key_cache.dtype);
  auto aligned = [&](const CacheView& c) {
    return is_aligned(c.data, kPack * size, size, c.stride_block, c.stride_head, c.stride_slot);
  };
  if (p.head_dim % kPack != 0 || !aligned(p.key_cache) || !aligned(p.value_cache)) {
    return kVectorKernel<VectorTraits<Cache, 1, 256>>;
  }
  return p.head_dim <= 128 ? kVectorKernel<VectorTraits<Cache, kPack, 128>>
                           : kVectorKernel<VectorTraits<Cache, kPack, 256>>;
}

}  // namespace

const AttentionKernel& vector_kernel(const AttentionParams& p) {
  switch (p.key_cache.dtype) {
    case DType::kFloat32:
      return kernel_for<float>(p);
    case DType::kFloat16:
      return kernel_for<__half>(p);
    case DType::kBFloat16:
      return kernel_for<__nv_bfloat16>(p);
    default:
      return kernel_for<Quantised>(p);
  }
}

}  // namespace paged_kv::cuda
