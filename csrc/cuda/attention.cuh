// What the attention kernels share: which rows and keys a block works on, how a score becomes a weight's exponent, and
// how finished or partial rows are written.
//
// Rows. The query heads of a group (those that read one kv head) are rows of one small matrix: row r of a sequence is
// token r / group and head r % group of the group. A block works on a tile of neighbouring rows for one kv head, so
// that it loads each key and value once for all of them.
//
// Splits. A sequence with few rows (decode) is divided over blocks by keys: split i holds positions
// [i * kSplitKeys, (i + 1) * kSplitKeys), wherever the sequence, the batch or the device ends, so that a result depends
// on nothing else. Each split's partial rows are merged in ascending order by attention_merge.cu. A sequence with many
// rows is divided over blocks by tiles of rows. Which of the two a sequence is, its own query length says alone.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "elements.cuh"
#include "fast_divide.cuh"
#include "kernels.h"
#include "launch.cuh"
#include "page_table.cuh"
#include "prefix_search.cuh"
#include "softmax.cuh"
#include "views.cuh"

namespace paged_kv::cuda {

// A split is read by one block: 512 keys of 128 bfloat16 are 256 KiB, about 14 us of a multiprocessor's share of an
// H200's bandwidth, long beside the launch of a block, and the partial rows that it writes are 1 % of what it reads.
inline constexpr int kSplitKeys = 512;

// AttentionParams with what the host derives from them once.
struct AttentionLaunch : AttentionParams {
  FastDivide block_size_divide, group_divide;
  int32_t window_keys;  // 0: no window
  int32_t rows_per_tile;
  int32_t max_split_rows;       // a sequence with at most so many rows per kv head is split
  int32_t split_rows;           // rows of a split sequence that the partial buffers have room for
  int32_t num_splits;           // of a sequence, at most
  int64_t first_seq, end_seq;   // whose splits this launch works on
  int64_t num_split_blocks;     // blocks [0, num_split_blocks) of the grid work on splits, the others on tiles
  float* partial_out;           // [end_seq - first_seq, num_kv_heads, split_rows, num_splits, head_dim]
  SoftmaxState* partial_state;  // [end_seq - first_seq, num_kv_heads, split_rows, num_splits]

  __device__ int group() const { return static_cast<int>(group_divide.divisor); }
};

struct Sequence {
  int64_t index;
  int32_t first_token;  // in the packed tokens
  int32_t query_len, seq_len;

  __device__ Sequence(const AttentionLaunch& p, int64_t i)
      : index(i),
        first_token(p.query_start_loc[i]),
        query_len(p.query_start_loc[i + 1] - p.query_start_loc[i]),
        seq_len(p.seq_lens[i]) {}

  __device__ int num_rows(const AttentionLaunch& p) const { return query_len * p.group(); }
  __device__ bool is_split(const AttentionLaunch& p) const { return num_rows(p) <= p.max_split_rows; }
  __device__ int position(int token) const { return seq_len - query_len + token; }

  // Token i of the query sees the keys [first_key(i), end_key(i)), none if empty. Both never fall with i.
  __device__ int first_key(const AttentionLaunch& p, int token) const {
    return p.window_keys == 0 ? 0 : max(0, position(token) - p.window_keys + 1);
  }
  __device__ int end_key(const AttentionLaunch& p, int token) const { return p.causal ? position(token) + 1 : seq_len; }
  __device__ bool sees_a_key(const AttentionLaunch& p, int token) const {
    return first_key(p, token) < end_key(p, token);
  }

  // The splits that any row sees a key of.
  __device__ int first_split(const AttentionLaunch& p) const { return first_key(p, 0) / kSplitKeys; }
  __device__ int end_split(const AttentionLaunch& p) const {
    return ceil_divide(end_key(p, query_len - 1), kSplitKeys);
  }
};

// A tile of rows and the keys of it that a block goes through.
struct Work {
  Sequence seq;
  int first_row, num_rows;
  int first_key, end_key;        // what some row of the tile sees, within the split
  int all_see_from, all_see_to;  // between which every row of the tile sees every key
  int split;                     // counted from the sequence's first; negative: the rows are finished, not partial

  __device__ PageTable table(const AttentionLaunch& p) const {
    return {p.block_tables + seq.index * p.table_stride_seq, p.table_stride_block, p.block_size_divide};
  }
  __device__ int kv_head() const { return static_cast<int>(blockIdx.y); }
  __device__ int token(const AttentionLaunch& p, int row) const {
    return static_cast<int>(p.group_divide.divide(static_cast<uint32_t>(first_row + row)));
  }
  __device__ int head(const AttentionLaunch& p, int row) const {
    return kv_head() * p.group() + (first_row + row - token(p, row) * p.group());
  }
};

// The number-th tile of this block, the same for all of its threads: num_rows is 0 where there is none.
__device__ inline Work find_work(const AttentionLaunch& p, int number) {
  int64_t index;
  int first_row, split = -1;
  if (blockIdx.x < p.num_split_blocks) {
    index = p.first_seq + static_cast<int>(blockIdx.x) / p.num_splits;
    first_row = number * p.rows_per_tile;
    split = static_cast<int>(blockIdx.x) % p.num_splits;
  } else {
    const RunPosition at =
        find_run(p.num_seqs, blockIdx.x - p.num_split_blocks, threadIdx.x % kWarpSize, [&](int64_t i) {
          const Sequence seq(p, i);
          return seq.is_split(p) ? 0 : ceil_divide(seq.num_rows(p), p.rows_per_tile);
        });
    index = max(int64_t{0}, at.run);
    // The last rows see most keys and start first, so that short tiles fill the end.
    const int num_tiles = ceil_divide(Sequence(p, index).num_rows(p), p.rows_per_tile);
    first_row = at.run < 0 || number > 0 ? INT32_MAX : (num_tiles - 1 - static_cast<int>(at.offset)) * p.rows_per_tile;
  }

  Work work{Sequence(p, index), first_row, 0, 0, INT32_MAX, 0, 0, -1};
  if (first_row >= work.seq.num_rows(p)) return work;
  if (split >= 0) {
    const int first_split = work.seq.first_split(p), num_splits = work.seq.end_split(p) - first_split;
    // Where no row sees a key, the first block still writes the rows.
    if (!work.seq.is_split(p) || split >= max(1, num_splits)) return work;
    work.first_key = (first_split + split) * kSplitKeys;
    work.end_key = work.first_key + kSplitKeys;
    work.split = num_splits <= 1 ? -1 : split;
  }
  work.num_rows = min(p.rows_per_tile, work.seq.num_rows(p) - first_row);
  const int first_token = work.token(p, 0), last_token = work.token(p, work.num_rows - 1);
  work.first_key = max(work.first_key, work.seq.first_key(p, first_token));
  work.end_key = min(work.end_key, work.seq.end_key(p, last_token));
  work.all_see_from = work.seq.first_key(p, last_token);
  work.all_see_to = work.seq.end_key(p, first_token);
  return work;
}

// Calls body() for each tile of this block, all threads alike, with `shared` describing it: one tile, or, of a split
// sequence with many heads in a group, all of its rows, tile by tile. It stands in shared memory to leave the registers
// to the body.
template <class Body>
__device__ void for_each_tile(const AttentionLaunch& p, Work& shared, Body body) {
  for (int number = 0;; ++number) {
    const Work work = find_work(p, number);
    if (work.num_rows == 0) return;
    if (number > 0) __syncthreads();  // the body is done with the tile before
    if (threadIdx.x == 0) shared = work;
    __syncthreads();
    body();
  }
}

// What a thread knows of a row of its tile.
struct Row {
  int position, seq_len;
  float slope;  // of ALiBi, 0 without

  // Rows past the end of a tile repeat its last one, so that they mask nothing more; they are never written.
  __device__ Row(const AttentionLaunch& p, const Work& work, int row) {
    const int last = min(row, work.num_rows - 1), token = work.token(p, last);
    position = work.seq.position(token);
    seq_len = work.seq.seq_len;
    slope = p.alibi_slopes == nullptr ? 0.0f : p.alibi_slopes[work.head(p, last)];
  }

  __device__ bool sees(const AttentionLaunch& p, int key) const {
    return key <= (p.causal ? position : seq_len - 1) && (p.window_keys == 0 || key > position - p.window_keys);
  }

  // From q.k times all scales to the score, natural units.
  __device__ float score(const AttentionLaunch& p, float product, int key) const {
    if (p.softcap > 0.0f) product = p.softcap * tanhf(product / p.softcap);
    return product + slope * static_cast<float>(key - position);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// Rows out. Loops are not unrolled: what that would keep in registers makes the kernels spill.

struct FinishedRow {
  float factor;  // the summed values times this are the output
  float lse;
};

// Of a row that saw a key.
__device__ inline FinishedRow finish(SoftmaxState state, const float* sink) {
  const float before = state.m;
  float factor = 1.0f;
  if (sink != nullptr) {
    // expf, because a row far below its sink has the error of this factor in all of its output: exp_of's grows with -x.
    state.m = ptx::max_or_nan(before, *sink);
    const float x = before - state.base();
    factor = above_zero(expf(x), x);
    state.d *= factor;
    state.d += expf(*sink - state.base());
  }
  // An infinite LSE takes the whole of its row, and 0 / 0 is NaN where every score is -inf, as in the formula.
  if (state.m == INFINITY) return {before == INFINITY ? NAN : 0.0f, INFINITY};
  return {state.m == -INFINITY ? NAN : factor / state.d, state.base() + logf(state.d)};
}

// Writes one row of head_dim elements, token `token` of the sequence, called by a warp: values(d) are the summed
// values.
template <class Values>
__device__ void store_finished_row(const AttentionLaunch& p, const Sequence& seq, int token, int64_t head,
                                   const SoftmaxState& state, int lane, Values values) {
  const int64_t packed_token = seq.first_token + token;
  const bool sees_a_key = seq.sees_a_key(p, token);
  const FinishedRow row =
      sees_a_key ? finish(state, p.sinks == nullptr ? nullptr : p.sinks + head) : FinishedRow{0.0f, -INFINITY};
  with_float(p.out.dtype, [&](auto element) {
    using T = decltype(element);
    T* out = token_row<T>(p.out, packed_token, head);
#pragma unroll 1
    for (int d = lane; d < p.head_dim; d += kWarpSize) {
      out[d] = from_float<T>(sees_a_key ? values(d) * row.factor : 0.0f);
    }
  });
  if (lane == 0) p.lse[packed_token * p.lse_stride_token + head * p.lse_stride_head] = row.lse;
}

// The score of a row and a key that it sees, by one thread. Not inlined, to take no registers from the kernels.
template <class Cache>
[[gnu::noinline]] __device__ float score_of(const AttentionLaunch& p, const Work& work, int row, int key,
                                            const Page& page) {
  const Cache* key_row = cache_row<const Cache>(p.key_cache, page.block, work.kv_head(), page.slot);
  const float product = with_float(p.query.dtype, [&](auto element) {
    using T = decltype(element);
    const T* query = token_row<const T>(p.query, work.seq.first_token + work.token(p, row), work.head(p, row));
    float sum = 0.0f;
#pragma unroll 1
    for (int d = 0; d < p.head_dim; ++d) sum += to_float(query[d]) * to_float(key_row[d]);
    return sum;
  });
  const float k_scale = read_scale(p.k_scale, page.block, work.kv_head(), page.slot);
  return Row(p, work, row).score(p, product * p.scale * k_scale, key);
}

// What values that are not finite, or whose scales are not, add to element d of a row: infinity or NaN, whatever weight
// they have, unless that is 0, as only a score of -inf makes it; 0 if there are none. Slow, and rarely needed: scores
// are computed anew, by each lane for itself, as ptxas 13.0 finds too few predicates for the vector kernels on sm_90a
// (C7600) where store_rows has lanes wait for each other.
template <class Cache>
__device__ float sum_values_not_finite(const AttentionLaunch& p, const Work& work, int row, int d) {
  const PageTable table = work.table(p);
  const int token = work.token(p, row);
  const int end = min(work.end_key, work.seq.end_key(p, token));
  float sum = 0.0f;
#pragma unroll 1
  for (int key = max(work.first_key, work.seq.first_key(p, token)); key < end && sum == sum; ++key) {
    const Page page = table.locate(static_cast<uint32_t>(key));
    const auto value = cache_row<const Cache>(p.value_cache, page.block, work.kv_head(), page.slot)[d];
    const float v_scale = read_scale(p.v_scale, page.block, work.kv_head(), page.slot);
    if (is_finite(value) && is_finite(v_scale)) continue;
    const bool weighs_zero = score_of<Cache>(p, work, row, key, page) == -INFINITY;
    sum += weighs_zero ? NAN : to_float(value) * v_scale;
  }
  return sum;
}

// The index of a partial row in partial_state, and in partial_out when times head_dim.
__device__ inline int64_t partial_index(const AttentionLaunch& p, int64_t seq, int64_t kv_head, int64_t row,
                                        int64_t split) {
  return (((seq - p.first_seq) * p.num_kv_heads + kv_head) * p.split_rows + row) * p.num_splits + split;
}

// Where warps that shared out the keys leave their rows. The padding spreads rows over the banks.
template <int kKeyWarps_, int kRows_, int kHeadDim_>
struct RowExchange {
  static constexpr int kKeyWarps = kKeyWarps_, kRows = kRows_;
  float out[kKeyWarps][kRows][kHeadDim_ + 8];
  SoftmaxState state[kKeyWarps][kRows];
};

// Merges the key warps' rows in ascending order and writes them, a warp a row. Between the writing of `exchange` and
// this call stands a barrier. left_out: whether values that are not finite may be missing in the sums.
// sum_left_out(row, d) is what these add to element d, 0 without any.
template <class Exchange, class SumLeftOut>
__device__ void store_rows(const AttentionLaunch& p, const Work& work, Exchange& exchange, int warp, int num_warps,
                           int lane, bool left_out, SumLeftOut sum_left_out) {
  for (int row = warp; row < work.num_rows; row += num_warps) {
    SoftmaxState merged = exchange.state[0][row];
    float weight[Exchange::kKeyWarps];
    for (int i = 1; i < Exchange::kKeyWarps; ++i) merged.m = ptx::max_or_nan(merged.m, exchange.state[i][row].m);
    merged.d = 0.0f;
    for (int i = 0; i < Exchange::kKeyWarps; ++i) {
      weight[i] = merged.weight(exchange.state[i][row].m);
      merged.d += exchange.state[i][row].d * weight[i];
    }
    float* sums = exchange.out[0][row];
#pragma unroll 1
    for (int d = lane; d < p.head_dim; d += kWarpSize) {
      float sum = 0.0f;
      for (int i = 0; i < Exchange::kKeyWarps; ++i) sum += exchange.out[i][row][d] * weight[i];
      // NaN may be an infinite value times a weight that was rounded to 0, unless all of the row is NaN.
      const bool is_nan = sum != sum && merged.d == merged.d;
      if (left_out || is_nan) {
        const float rest = sum_left_out(row, d);
        sum = is_nan && rest != 0.0f ? rest : sum + rest;
      }
      sums[d] = sum;
    }
    if (work.split >= 0) {
      const int64_t index = partial_index(p, work.seq.index, work.kv_head(), work.first_row + row, work.split);
#pragma unroll 1
      for (int d = lane; d < p.head_dim; d += kWarpSize) p.partial_out[index * p.head_dim + d] = sums[d];
      if (lane == 0) p.partial_state[index] = merged;
    } else {
      store_finished_row(p, work.seq, work.token(p, row), work.head(p, row), merged, lane,
                         [&](int d) { return sums[d]; });
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Kernels

// What a kernel needs from the host to be launched.
struct AttentionKernel {
  int split_rows;     // sequences with at most so many rows, or one token, are split
  int rows_per_tile;  // that a block works on at once
  Error (*launch)(const AttentionLaunch& p, dim3 grid, const Context& context);
};

// For these parameters' dtypes, head size and alignment; null where tensor cores cannot be used.
const AttentionKernel* tensor_core_kernel(const AttentionParams& p);

// For any parameters.
const AttentionKernel& vector_kernel(const AttentionParams& p);

// Merges the partial rows of split sequences.
Error merge_splits(const AttentionLaunch& p, const Context& context);

}  // namespace paged_kv::cuda
