// Attention on tensor cores (FlashAttention-2's loop: Dao, "FlashAttention-2", 2023) over pages: float16 and bfloat16,
// and their queries over fp8 and int8 caches, which are dequantised in registers. Four warps walk the tile's keys,
// which stream through shared memory by cp.async. With few rows (decode) the warps share out the keys of each tile;
// with more they share out the rows. Both are one kernel, so that one launch serves sequences of both kinds.
#include <type_traits>

#include "attention.cuh"
#include "fragments.cuh"

namespace paged_kv::cuda {
namespace {

constexpr int kWarps = 4, kThreads = kWarps * kWarpSize;
constexpr int kRowsPerWarp = 16;              // of mma
constexpr int kRows = kWarps * kRowsPerWarp;  // of a tile of rows
constexpr int kFewRows = kRowsPerWarp;        // up to which the warps share out the keys

// Shared memory decides: two blocks fit on a multiprocessor of sm_90 and sm_100, one on sm_86 and sm_89 (99 KiB).
struct Tuning {
  int head_dim, element_bytes;
  int keys;    // of a tile
  int stages;  // tiles in shared memory
};
constexpr Tuning kTunings[] = {
    {64, 2, 64, 3},   // 56 KiB; tiles are small, so one more is under way
    {128, 2, 64, 2},  // 80 KiB; a third stage would leave one block on sm_80
    {256, 2, 32, 2},  // 96 KiB; 64 keys would be 160 KiB, one block everywhere and none on sm_89
    {64, 1, 64, 3},   // 33 KiB
    {128, 1, 64, 3},  // 66 KiB
    {256, 1, 32, 3},  // 81 KiB; the scores of 64 keys beside 128 sums would not fit in a thread's registers
};
constexpr Tuning tuning(int head_dim, int element_bytes) {
  for (const Tuning& t : kTunings) {
    if (t.head_dim == head_dim && t.element_bytes == element_bytes) return t;
  }
  return {};
}

// T is multiplied, Cache is stored: equal, or T is float16 and Cache is quantised. Float16 holds every number of the
// quantised formats, and its weights are finer than bfloat16's, so it serves queries of both float types there.
template <class T_, class Cache_, int kHeadDim_>
struct TensorTraits {
  using T = T_;
  using Cache = Cache_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kIsQuantised = !std::is_same_v<T, Cache>;
  // Weights are in units of 2^-kWeightExponent, so that those that float16 rounds to 0 are below 2^-40 of the largest,
  // as 2^-25 is too much for the many keys beside a heavy one whose value is small, or whose scale is large.
  static constexpr int kWeightExponent = std::is_same_v<T, __half> ? 15 : 0;
  static constexpr float kWeightUnit = 1.0f / (1 << kWeightExponent);
  static constexpr int kKeys = tuning(kHeadDim, sizeof(Cache)).keys;
  static constexpr int kStages = tuning(kHeadDim, sizeof(Cache)).stages;
  static constexpr int kCacheBytes = kHeadDim * static_cast<int>(sizeof(Cache));  // of a row
  static_assert(kKeys % 16 == 0 && kSplitKeys % kKeys == 0, "a split is whole tiles");
  static_assert(kThreads % (kCacheBytes / 16) == 0, "a thread loads the same chunk of each of its rows");
  static_assert(2 * kKeys <= kThreads, "a thread loads one scale");

  static constexpr int kScales = kIsQuantised ? kKeys : 1;  // of a tile; unused where 1
  struct Stage {
    Tile<kKeys, kCacheBytes> keys, values;
    float k_scale[kScales], v_scale[kScales];
  };
  struct Pipeline {
    Tile<kRows, kHeadDim * 2> query;
    float query_factor[kIsQuantised ? kRows : 1];  // what queries over a quantised cache were divided by
    Stage stages[kStages];
  };
  // With few rows, warps that find none for them leave theirs out: 16 rows and a tile of 32 keys occupy two warps.
  static constexpr int kKeyWarpsOfFew = kKeys / 16 < kWarps ? kKeys / 16 : kWarps;
  struct SharedStorage {
    Work work;
    union {
      Pipeline pipeline;
      RowExchange<1, kRows, kHeadDim> many;
      RowExchange<kKeyWarpsOfFew, kRows / kKeyWarpsOfFew, kHeadDim> few;
    };
  };
};

// ---------------------------------------------------------------------------------------------------------------------
// Loads

// Queries of the tile into the first `rows` rows of shared memory, zeros beyond the tile and the head. A warp loads a
// row. Where the cache is quantised they become float16, divided by a power of two that brings the largest to 1 or
// below.
template <class Traits>
__device__ __forceinline__ void load_query_tile(typename Traits::Pipeline& smem, const AttentionLaunch& p,
                                                const Work& work, int warp, int lane, int rows) {
  using T = typename Traits::T;
  constexpr int kPerChunk = 8;
  for (int row = warp; row < rows; row += kWarps) {
    const int d = lane * kPerChunk;
    const bool is_read = row < work.num_rows && d < p.head_dim;
    ptx::Words<16> chunk{};
    if (is_read) {
      const int64_t token = work.seq.first_token + work.token(p, row);
      chunk = ptx::load_once<16>(token_row<const uint16_t>(p.query, token, work.head(p, row)) + d);
    }
    if constexpr (Traits::kIsQuantised) {
      float element[kPerChunk], largest = 0.0f;
      for (int e = 0; e < kPerChunk; ++e) {
        const uint16_t bits = static_cast<uint16_t>(chunk.word[e / 2] >> (16 * (e % 2)));
        element[e] = p.query.dtype == DType::kBFloat16 ? __uint_as_float(uint32_t{bits} << 16)
                                                       : __half2float(__ushort_as_half(bits));
        largest = fmaxf(largest, fabsf(element[e]));
      }
      for (int bits = kWarpSize / 2; bits > 0; bits /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, bits));
      }
      // The exponent alone, so that the division is exact; a row of zeros, infinities or subnormals stays as it is.
      const uint32_t exponent = __float_as_uint(largest) & 0x7f800000u;
      const bool scales = exponent != 0 && exponent < 0x7e800000u;
      const float factor = scales ? __uint_as_float(exponent) : 1.0f;
      const float inverse = scales ? __uint_as_float(0x7f000000u - exponent) : 1.0f;
      for (int i = 0; i < 4; ++i) {
        chunk.word[i] = pack_pair<T>(element[2 * i] * inverse, element[2 * i + 1] * inverse);
      }
      if (lane == 0) smem.query_factor[row] = factor;
    }
    if (d < Traits::kHeadDim) ptx::store_shared(smem.query.at(row, lane & -8, lane & 7), chunk);
  }
}

// Starts the copies of keys and values at positions [first, first + kKeys) as one group; zeros for those that no row of
// the tile sees, whose blocks may be gone.
template <class Traits>
__device__ __forceinline__ void load_tile(typename Traits::Stage& stage, const AttentionLaunch& p, const Work& work,
                                          int first, int thread) {
  const PageTable table = work.table(p);
  using Cache = typename Traits::Cache;
  constexpr int kChunks = Traits::kCacheBytes / 16, kPerChunk = 16 / sizeof(Cache);
  const int chunk = thread % kChunks;
  const bool in_head = chunk * kPerChunk < p.head_dim;
  auto is_seen = [&](int key) { return key >= work.first_key && key < work.end_key; };
#pragma unroll 2  // of 8: addresses of all would displace sums from registers
  for (int i = thread / kChunks; i < Traits::kKeys; i += kThreads / kChunks) {
    const bool valid = in_head && is_seen(first + i);
    const Page page = valid ? table.locate(static_cast<uint32_t>(first + i)) : Page{0, 0};
    const int64_t d = valid ? chunk * kPerChunk : 0;
    ptx::cp_async_16(stage.keys.at(i, chunk),
                     cache_row<const Cache>(p.key_cache, page.block, work.kv_head(), page.slot) + d, valid);
    ptx::cp_async_16(stage.values.at(i, chunk),
                     cache_row<const Cache>(p.value_cache, page.block, work.kv_head(), page.slot) + d, valid);
  }
  if constexpr (Traits::kIsQuantised) {
    const bool is_key = thread < Traits::kKeys;
    const int i = is_key ? thread : thread - Traits::kKeys;
    const ScaleView& scale = is_key ? p.k_scale : p.v_scale;
    if (i < Traits::kKeys && scale.data != nullptr) {
      const bool valid = is_seen(first + i);
      const Page page = valid ? table.locate(static_cast<uint32_t>(first + i)) : Page{0, 0};
      ptx::cp_async_4(is_key ? &stage.k_scale[i] : &stage.v_scale[i],
                      scale_at(scale, page.block, work.kv_head(), page.slot), valid);
    }
  }
  ptx::cp_async_commit();
}

// ---------------------------------------------------------------------------------------------------------------------
// One warp's 16 rows and kBlocks * 8 keys of a tile

template <class Traits, int kBlocks>
struct WarpTile {
  static constexpr int kOutBlocks = Traits::kHeadDim / 8;
  SoftmaxState state[2];     // of rows g and g + 8; d: this lane's share, m: the same in the four lanes of a row
  float value_scale = 0.0f;  // `out` is in units of it: the largest scale of a value so far. Where quantised
  float out[kOutBlocks][4];  // rows g (first two) and g + 8 of each block of the head's elements
  float score[kBlocks][4];   // the same of each block of keys

  __device__ __forceinline__ WarpTile() {
#pragma unroll
    for (int block = 0; block < kOutBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[block][i] = 0.0f;
    }
  }

  __device__ int key_of(int first, int block, int i) const {
    return first + 8 * block + 2 * static_cast<int>(threadIdx.x % 4) + i % 2;
  }
};

// Query times keys.
template <class Traits, int kBlocks>
__device__ __forceinline__ void multiply_keys(WarpTile<Traits, kBlocks>& w, const typename Traits::Pipeline& smem,
                                              const typename Traits::Stage& stage, int first_row, int first_key,
                                              int lane) {
  using T = typename Traits::T;
  using Cache = typename Traits::Cache;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    for (int i = 0; i < 4; ++i) w.score[block][i] = 0.0f;
  }
  constexpr int kSteps = kStepsTogether<T, Cache>;
#pragma unroll
  for (int number = 0; number < Traits::kHeadDim / 16 / kSteps; ++number) {
    uint32_t a[kSteps][4];
    load_query<T, Cache>(a, smem.query, first_row, number, lane);
#pragma unroll
    for (int pair = 0; pair < kBlocks / 2; ++pair) {
      Keys<T, Cache> keys;
      load_keys(keys, stage.keys, first_key + 16 * pair, number, lane);
#pragma unroll
      for (int block = 0; block < 2; ++block) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          uint32_t b[2];
          keys.fragment(b, block, step);
          ptx::mma_m16n8k16<T>(w.score[2 * pair + block], a[step], b[0], b[1]);
        }
      }
    }
  }
}

// Products become scores, -inf where the row does not see the key. `first`: position of the warp's first key, which is
// number first_key of the stage. What is known of rows is found anew for each tile, to spare registers.
template <class Traits, int kBlocks>
__device__ __forceinline__ void finish_scores(WarpTile<Traits, kBlocks>& w, const AttentionLaunch& p, const Work& work,
                                              const typename Traits::Pipeline& smem,
                                              const typename Traits::Stage& stage, int first_row, int first,
                                              int first_key, bool is_masked) {
  const bool is_plain = p.softcap == 0.0f && p.alibi_slopes == nullptr;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const Row row(p, work, first_row + 8 * r);
    const float scale = Traits::kIsQuantised ? p.scale * smem.query_factor[first_row + 8 * r] : p.scale;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        const int key = w.key_of(first, block, i);
        // Never joined with what is subtracted from it later: the largest of scores from some 2^31 on would differ from
        // itself by so much that its weight overflows.
        float product = __fmul_rn(w.score[block][i], scale);
        if constexpr (Traits::kIsQuantised) {
          if (p.k_scale.data != nullptr) product *= stage.k_scale[first_key + key - first];
        }
        const float score = is_plain ? product : row.score(p, product, key);
        w.score[block][i] = is_masked && !row.sees(p, key) ? -INFINITY : score;
      }
    }
  }
}

// Scores become weights, and what was summed so far is brought to the new largest score.
template <class Traits, int kBlocks>
__device__ __forceinline__ void update_state(WarpTile<Traits, kBlocks>& w, float value_rescale) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float largest = -INFINITY;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      largest = ptx::max_or_nan(largest, ptx::max_or_nan(w.score[block][2 * r], w.score[block][2 * r + 1]));
    }
    for (int bits = 1; bits < 4; bits *= 2) {
      largest = ptx::max_or_nan(largest, __shfl_xor_sync(kAllLanes, largest, bits));
    }
    const float rescale = w.state[r].raise(largest) * value_rescale;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
      for (int i = 2 * r; i < 2 * r + 2; ++i) {
        w.score[block][i] = w.state[r].weight(w.score[block][i], Traits::kWeightExponent);
        w.state[r].d += w.score[block][i];
      }
    }
#pragma unroll
    for (int block = 0; block < w.kOutBlocks; ++block) {
      w.out[block][2 * r] *= rescale;
      w.out[block][2 * r + 1] *= rescale;
    }
  }
}

// The largest finite scale of the tile's values, for which zeros stand at keys that no row sees. All of a warp alike.
template <class Traits>
__device__ __forceinline__ float largest_value_scale(const AttentionLaunch& p, const typename Traits::Stage& stage,
                                                     int lane) {
  if (p.v_scale.data == nullptr) return 1.0f;
  float largest = 0.0f;
  for (int key = lane; key < Traits::kKeys; key += kWarpSize) {
    const float scale = fabsf(stage.v_scale[key]);
    if (scale < INFINITY) largest = fmaxf(largest, scale);
  }
  for (int bits = kWarpSize / 2; bits > 0; bits /= 2) {
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, bits));
  }
  return largest;
}

// out += weights times values
template <class Traits, int kBlocks>
__device__ __forceinline__ void multiply_values(WarpTile<Traits, kBlocks>& w, const AttentionLaunch& p,
                                                const typename Traits::Stage& stage, int first_key, int lane) {
  using T = typename Traits::T;
  if constexpr (Traits::kIsQuantised) {
    if (p.v_scale.data != nullptr) {
      const float inverse = w.value_scale == 0.0f ? 0.0f : 1.0f / w.value_scale;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w.score[block][i] *= stage.v_scale[w.key_of(first_key, block, i)] * inverse;
        }
      }
    }
  }
#pragma unroll
  for (int pair = 0; pair < kBlocks / 2; ++pair) {
    const float (&low)[4] = w.score[2 * pair];
    const float (&high)[4] = w.score[2 * pair + 1];
    const uint32_t a[4] = {pack_pair<T>(low[0], low[1]), pack_pair<T>(low[2], low[3]), pack_pair<T>(high[0], high[1]),
                           pack_pair<T>(high[2], high[3])};
#pragma unroll
    for (int four = 0; four < w.kOutBlocks / 4; ++four) {
      uint32_t b[4][2];
      load_values<T, typename Traits::Cache>(b, stage.values, first_key + 16 * pair, four, lane);
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        ptx::mma_m16n8k16<T>(w.out[4 * four + block], a, b[block][0], b[block][1]);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Values that are not finite, or whose scales are not: 0 * NaN is NaN, so in a tile where some row sees a key and
// another does not, the product would spread them to rows that do not see them. There they are left out of the
// products, and store_rows adds them to each row that does see them. That is slow and rare.

// Whether this thread's part of the tile's values has one.
template <class Traits>
__device__ __forceinline__ bool finds_value_not_finite(const AttentionLaunch& p, const typename Traits::Stage& stage,
                                                       int thread) {
  using Cache = typename Traits::Cache;
  constexpr int kChunks = Traits::kCacheBytes / 16, kPerChunk = 16 / sizeof(Cache);
  bool found = false;
  if constexpr (Traits::kIsQuantised) {
    found = p.v_scale.data != nullptr && thread < Traits::kKeys && !is_finite(stage.v_scale[thread]);
  }
#pragma unroll 1
  for (int i = thread; i < Traits::kKeys * kChunks; i += kThreads) {
    const auto words = ptx::load_shared_16(stage.values.at(i / kChunks, i % kChunks));
    Pack<Cache, kPerChunk> pack;
    memcpy(&pack, &words, sizeof(pack));
    for (int e = 0; e < kPerChunk; ++e) found = found || !is_finite(pack.element[e]);
  }
  return found;
}

// Puts zeros in their places.
template <class Traits>
__device__ __forceinline__ void clear_values_not_finite(const AttentionLaunch& p, typename Traits::Stage& stage,
                                                        int thread) {
  using Cache = typename Traits::Cache;
  constexpr int kPerChunk = 16 / sizeof(Cache);
  if constexpr (Traits::kIsQuantised) {
    if (p.v_scale.data != nullptr && thread < Traits::kKeys && !is_finite(stage.v_scale[thread])) {
      stage.v_scale[thread] = 0.0f;
    }
  }
#pragma unroll 1
  for (int i = thread; i < Traits::kKeys * Traits::kHeadDim; i += kThreads) {
    const int key = i / Traits::kHeadDim, d = i % Traits::kHeadDim;
    Cache& value = reinterpret_cast<Cache*>(stage.values.at(key, d / kPerChunk))[d % kPerChunk];
    if (!is_finite(value)) value = Cache{};
  }
}

// ---------------------------------------------------------------------------------------------------------------------

// kKeyWarps warps share out the keys of each tile; groups of them share out the rows.
template <class Traits, int kKeyWarps, class Exchange>
__device__ void attend(const AttentionLaunch& p, const Work& work, typename Traits::Pipeline& smem,
                       Exchange& exchange) {
  constexpr int kKeys = Traits::kKeys, kStages = Traits::kStages, kBlocks = kKeys / kKeyWarps / 8;
  const int thread = threadIdx.x, warp = thread / kWarpSize, lane = thread % kWarpSize;
  const int key_warp = warp % kKeyWarps, first_row = warp / kKeyWarps * kRowsPerWarp;
  const bool has_rows = first_row < work.num_rows;
  const int first_key = key_warp * (kKeys / kKeyWarps);  // in a stage
  load_query_tile<Traits>(smem, p, work, warp, lane, kRows / kKeyWarps);

  // Tiles stand at fixed positions, whatever the window hides.
  const int first_tile = work.first_key / kKeys * kKeys;
  auto load = [&](int tile) {
    const int number = (tile - first_tile) / kKeys;
    if (tile < work.end_key) {
      load_tile<Traits>(smem.stages[number % kStages], p, work, tile, thread);
    } else {
      ptx::cp_async_commit();  // an empty group, so that the count of groups stays right
    }
  };
  for (int i = 0; i < kStages - 1; ++i) load(first_tile + i * kKeys);

  WarpTile<Traits, kBlocks> w;
  bool left_out = false;  // values that are not finite
  int number = 0;
  for (int tile = first_tile; tile < work.end_key; tile += kKeys, ++number) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();  // this tile is here for all, and the stage of the tile before is free
    load(tile + (kStages - 1) * kKeys);
    typename Traits::Stage& stage = smem.stages[number % kStages];

    const bool is_masked = tile < work.all_see_from || tile + kKeys > work.all_see_to;
    // Keys that no row sees are zeros here, so only those seen by some rows alone can do harm.
    const bool is_mixed =
        max(tile, work.first_key) < work.all_see_from || min(tile + kKeys, work.end_key) > work.all_see_to;
    if (has_rows) {
      multiply_keys<Traits, kBlocks>(w, smem, stage, first_row, first_key, lane);
      finish_scores<Traits, kBlocks>(w, p, work, smem, stage, first_row + lane / 4, tile + first_key, first_key,
                                     is_masked);
      float value_rescale = 1.0f;
      if constexpr (Traits::kIsQuantised) {
        const float before = w.value_scale;
        w.value_scale = fmaxf(before, largest_value_scale<Traits>(p, stage, lane));
        value_rescale = w.value_scale == 0.0f ? 1.0f : before / w.value_scale;
      }
      update_state<Traits, kBlocks>(w, value_rescale);
    }
    if (is_mixed && __syncthreads_or(finds_value_not_finite<Traits>(p, stage, thread))) {
      clear_values_not_finite<Traits>(p, stage, thread);
      left_out = true;
      __syncthreads();
    }
    if (has_rows) multiply_values<Traits, kBlocks>(w, p, stage, first_key, lane);
  }

  // The rows go through shared memory, where key warps meet and from where whole rows are written.
  ptx::cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    for (int bits = 1; bits < 4; bits *= 2) w.state[r].d += __shfl_xor_sync(kAllLanes, w.state[r].d, bits);
    const int row = first_row + lane / 4 + 8 * r;
    if (lane % 4 == 0) exchange.state[key_warp][row] = {w.state[r].m, w.state[r].d * Traits::kWeightUnit};
    // Each by itself, as their product may be too little for float32.
    auto finish = [&](float sum) {
      sum *= Traits::kWeightUnit;
      return Traits::kIsQuantised ? sum * w.value_scale : sum;
    };
#pragma unroll
    for (int block = 0; block < w.kOutBlocks; block += 2) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        // Two neighbouring elements of the head: columns of one block, or one column of two blocks.
        const int d = element_of_block<typename Traits::T, typename Traits::Cache>(
            Traits::kIsQuantised ? block : block + i, 2 * (lane % 4) + (Traits::kIsQuantised ? i : 0));
        const float first = Traits::kIsQuantised ? w.out[block][2 * r + i] : w.out[block + i][2 * r];
        const float second = Traits::kIsQuantised ? w.out[block + 1][2 * r + i] : w.out[block + i][2 * r + 1];
        *reinterpret_cast<float2*>(&exchange.out[key_warp][row][d]) = make_float2(finish(first), finish(second));
      }
    }
  }
  __syncthreads();
  store_rows(p, work, exchange, warp, kWarps, lane, left_out,
             [&](int row, int d) { return sum_values_not_finite<typename Traits::Cache>(p, work, row, d); });
}

// kSharedBytes stands in the kernel's name for `make cuda-check`, which computes how many blocks fit.
template <class Traits, size_t kSharedBytes = sizeof(typename Traits::SharedStorage)>
__global__ void __launch_bounds__(kThreads) tensor_kernel_of(const __grid_constant__ AttentionLaunch p) {
  auto& smem = ptx::dynamic_smem<typename Traits::SharedStorage>();
  for_each_tile(p, smem.work, [&] {
    if (smem.work.seq.num_rows(p) <= kFewRows) {
      attend<Traits, Traits::kKeyWarpsOfFew>(p, smem.work, smem.pipeline, smem.few);
    } else {
      attend<Traits, 1>(p, smem.work, smem.pipeline, smem.many);
    }
  });
}

template <class Traits>
constexpr AttentionKernel kTensorKernel = {.split_rows = kFewRows,
                                           .rows_per_tile = kRows,
                                           .launch = [](const AttentionLaunch& p, dim3 grid, const Context& context) {
                                             return launch(tensor_kernel_of<Traits>, grid, kThreads,
                                                           sizeof(typename Traits::SharedStorage), context, p);
                                           }};

template <class T, class Cache>
const AttentionKernel* kernel_for(int64_t head_dim) {
  if (head_dim <= 64) return &kTensorKernel<TensorTraits<T, Cache, 64>>;
  if (head_dim <= 128) return &kTensorKernel<TensorTraits<T, Cache, 128>>;
  return &kTensorKernel<TensorTraits<T, Cache, 256>>;
}

}  // namespace

const AttentionKernel* tensor_core_kernel(const AttentionParams& p) {
  const int64_t size = element_size(p.key_cache.dtype);
  auto aligned = [&](const CacheView& c) {
    return is_aligned(c.data, 16, size, c.stride_block, c.stride_head, c.stride_slot);
  };
  if (p.query.dtype == DType::kFloat32 || p.head_dim * size % 16 != 0 || !aligned(p.key_cache) ||
      !aligned(p.value_cache) || !is_aligned(p.query.data, 16, 2, p.query.stride_token, p.query.stride_head)) {
    return nullptr;
  }
  switch (p.key_cache.dtype) {
    case DType::kFloat16:
      return kernel_for<__half, __half>(p.head_dim);
    case DType::kBFloat16:
      return kernel_for<__nv_bfloat16, __nv_bfloat16>(p.head_dim);
    case DType::kFloat8E4M3:
      return kernel_for<__half, Float8E4M3>(p.head_dim);
    case DType::kFloat8E5M2:
      return kernel_for<__half, Float8E5M2>(p.head_dim);
    case DType::kInt8:
      return kernel_for<__half, int8_t>(p.head_dim);
    default:
      return nullptr;
  }
}

}  // namespace paged_kv::cuda
