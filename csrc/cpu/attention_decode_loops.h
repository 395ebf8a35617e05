// The two products of decode, of up to four query rows with the keys and values of a tile: each is converted once for
// all of them. Scores of a few tokens times the rows, and output chunks of the rows, are kept in registers.
//
// With AVX2 (Zen 4, 2.8 GHz), bfloat16, D 128 and four rows, a core's multiply-adds allow 44.8 million tokens a second
// and key head, 22 GB/s: 11.1 ns for each product. Out of L1 scores take 13.3 ns and values 12.7, softmax 3.3. Tried,
// and not held: twelve sums instead of eight (GCC spills them), tiles of 32 keys, the softmax of all rows phase by
// phase, longer unrolling.
//
// With AVX-512-BF16 (Zen 5), the same out of L1: 12.0 ns a token, and 9.5 with one request for each line instead of
// five, of which multiply-adds need 4 and softmax 1.7; out of memory 13.9, where a plain read takes 12.7. A cache of
// bytes takes some 10, bound by its instructions: its requests make no difference. Tried, and not held: tiles of 32 or
// 128 keys; the softmax of four rows at once; values for two rows at a time, so that they, too, are read in the order
// of memory.
#pragma once

#include "cpu/attention_fetch.h"
#include "cpu/attention_tile.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

// Sums that stay in registers: half of them, so that as many are left for operands.
inline constexpr int kSums = kWidth == 16 ? 16 : 8;

// scores[r][t] = query row r . keys[t] for kRows rows and `count` tokens of a tile; the scores of up to kSums - 1 more
// tokens are written, too.
template <class P, int kRows, Ask kAsk>
void score_by_chunks(const typename P::Operand* query, int64_t padded_dim, int64_t head_dim,
                     const typename P::Element* const* keys, int count, float* scores,
                     Fetch<typename P::Element> fetch) {
  constexpr int kTokens = kSums / kRows, kGroup = Fetch<typename P::Element>::kGroup;
  for (uint64_t t = 0; t < static_cast<uint64_t>(count); t += kTokens) {
    const typename P::Element* key[kTokens];
    for (int i = 0; i < kTokens; ++i) key[i] = keys[t + i];
    typename P::Sum sums[kSums]{};  // [kRows][kTokens]
    auto add_chunk = [&](int64_t d, int chunk) __attribute__((always_inline)) {
      keys = forget(keys);
      const auto pass = fetch.template pass<kChunk>(d, kTokens);
      constexpr int kCount = std::min(kTokens, kGroup);
      for (int i = 0; i < kTokens; i += kCount) {
        const auto group = fetch.template group<kAsk>(keys + t / kGroup * kGroup, i, pass);
        fetch.template beside<kAsk, kChunk, kCount>(group, t % kGroup, d);
      }
      typename P::Key chunks[kTokens];
      if constexpr (requires { &P::load_two_keys; }) {
        for (int i = 0; i < kTokens; i += 2) P::load_two_keys(key[i] + d, key[i + 1] + d, chunk, chunks + i);
      } else {
        for (int i = 0; i < kTokens; ++i) chunks[i] = P::load_key(key[i] + d, chunk);
      }
      const auto* row = query + d;
      for (int r = 0; r < kRows; ++r) {
        P::template add_scores<kTokens>(sums + r * kTokens, chunks, row);
        row = forget(row + padded_dim);
      }
    };
    int64_t d = 0;
    for (; d + kChunk <= head_dim; d += kChunk) add_chunk(d, kChunk);
    if (d < head_dim) add_chunk(d, static_cast<int>(head_dim - d));
    float totals[kSums];
    for (int i = 0; i < kSums; i += kWidth) {
      store(totals + i, P::to_floats(sum_each(reinterpret_cast<typename P::Sum(&)[kWidth]>(sums[i]))));
    }
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * kTile + t, totals + r * kTokens, kTokens * sizeof(float));
  }
}

#if PAGED_KV_WIDTH == 16
// The same, two tokens at a time, so that keys are read in the order of memory. add_pair(sums, first, second, group,
// token) adds the products of the rows with two keys, those at `token` and after it of a group of others, to request
// beside them.
template <class P, int kRows, class F>
PAGED_KV_INLINE void score_by_pairs(const typename P::Element* const* keys, int count, float* scores, F add_pair) {
  using Fetch = Fetch<typename P::Element>;
  constexpr int kTokens = kSums / kRows;
  for (uint64_t t = 0; t < static_cast<uint64_t>(count); t += kTokens) {
    keys = forget(keys);
    Vec halves[kSums / 2];  // [kRows][kTokens / 2]
    unrolled<kTokens / 2>([&](auto pair) __attribute__((always_inline)) {
      constexpr int kFirst = 2 * pair, kInGroup = kFirst % Fetch::kGroup;
      const typename Fetch::Group group{keys + t + kFirst - kInGroup, 0};
      Vec sums[kRows][2]{};
      add_pair(sums, keys[t + kFirst], keys[t + kFirst + 1], group, std::integral_constant<int, kInGroup>());
      for (int r = 0; r < kRows; ++r) halves[r * kTokens / 2 + pair] = sum_halves(sums[r][0], sums[r][1]);
    });
    float totals[kSums];
    store(totals, sum_each_half(halves));
    for (int r = 0; r < kRows; ++r) std::memcpy(scores + r * kTile + t, totals + r * kTokens, kTokens * sizeof(float));
  }
}

#ifdef __AVX512BF16__
// For rows of kChunks chunks, which stay in registers, so that no key waits for the load of a query: decode takes 0.97
// of score_by_chunks' time, 0.88 with one row. (Where bytes are converted to bfloat16 it takes 1.05, as the tables are
// then short of registers.)
template <int kRows, int kChunks, Ask kAsk>
void score_kept_rows(const BFloat16* query, int64_t head_dim, const BFloat16* const* keys, int count, float* scores,
                     Fetch<BFloat16> fetch) {
  static_assert(kRows * kChunks <= kSums);
  const int last = static_cast<int>(head_dim) - (kChunks - 1) * kChunk;
  UintVec rows[kRows][kChunks];
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kChunks; ++c) rows[r][c] = keep(load_words(query + (r * kChunks + c) * kChunk));
  }
  auto add_pair = [&](auto& sums, auto* first, auto* second, auto& group, auto token) __attribute__((always_inline)) {
    unrolled<kChunks>([&](auto c) __attribute__((always_inline)) {
      fetch.template beside_pair<kAsk, kChunk>(group, token, c * kChunk, kChunks * kChunk);
      const int size = c + 1 < kChunks ? kChunk : last;
      const UintVec both[2] = {load_words(first + c * kChunk, size), load_words(second + c * kChunk, size)};
      for (int i = 0; i < 2; ++i) {
        for (int r = 0; r < kRows; ++r) BFloat16Products::add_product(sums[r][i], both[i], rows[r][c]);
      }
    });
  };
  score_by_pairs<BFloat16Products, kRows>(keys, count, scores, add_pair);
}
#endif

// For float32: decode takes 0.96 of score_by_chunks' time where memory is slower, and 1.01 where it is fast.
template <int kRows, Ask kAsk>
void score_float_rows(const float* query, int64_t padded_dim, int64_t head_dim, const float* const* keys, int count,
                      float* scores, Fetch<float> fetch) {
  using P = FloatProducts<float>;
  auto add_pair = [&](auto& sums, auto* first, auto* second, auto& group, auto token) __attribute__((always_inline)) {
    auto add_chunk = [&](int64_t d, int size) __attribute__((always_inline)) {
      fetch.template beside_pair<kAsk, kChunk>(group, token, d, padded_dim);
      const Chunk both[2] = {P::load_key(first + d, size), P::load_key(second + d, size)};
      const float* row = query + d;
      for (int r = 0; r < kRows; ++r) {
        P::add_scores<2>(sums[r], both, row);
        row = forget(row + padded_dim);
      }
    };
    int64_t d = 0;
    for (; d + kChunk <= head_dim; d += kChunk) add_chunk(d, kChunk);
    if (d < head_dim) add_chunk(d, static_cast<int>(head_dim - d));
  };
  score_by_pairs<P, kRows>(keys, count, scores, add_pair);
}
#endif

// score_by_chunks, in the quickest way: of bfloat16 rows, those of 33 to 128 elements fit into registers.
template <class P, int kRows, Ask kAsk>
void score_rows(const typename P::Operand* query, int64_t padded_dim, int64_t head_dim,
                const typename P::Element* const* keys, int count, float* scores, Fetch<typename P::Element> fetch) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<P, BFloat16Products>) {
    auto kept = [&](auto kChunks) {
      score_kept_rows<kRows, kChunks(), kAsk>(query, head_dim, keys, count, scores, fetch);
    };
    switch (padded_dim / kChunk) {
      case 2:
        return kept(std::integral_constant<int, 2>());
      case 3:
        return kept(std::integral_constant<int, 3>());
      case 4:
        return kept(std::integral_constant<int, 4>());
    }
  }
#endif
#if PAGED_KV_WIDTH == 16
  if constexpr (std::is_same_v<P, FloatProducts<float>>) {
    return score_float_rows<kRows, kAsk>(query, padded_dim, head_dim, keys, count, scores, fetch);
  }
#endif
  score_by_chunks<P, kRows, kAsk>(query, padded_dim, head_dim, keys, count, scores, fetch);
}

// sums[r][d..] = sums[r][d..] * factors[r] + weights[r] . values[begin..end)[d..] for kRows rows and kChunks chunks of
// d, the last of `chunk` elements.
template <class P, int kRows, int kChunks, Ask kAsk>
PAGED_KV_INLINE void add_value_chunks(float* out, int64_t padded_dim, const float* factors,
                                      const typename P::Weight* weights, const typename P::Element* const* values,
                                      int64_t begin, int64_t end, int64_t d, int chunk,
                                      Fetch<typename P::Element> fetch) {
  Chunk sums[kRows][kChunks];
  auto for_each_sum = [&](auto f) __attribute__((always_inline)) {
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      unrolled<kChunks>(
          [&](auto c) __attribute__((always_inline)) { f(r(), sums[r][c], out + r * padded_dim + d + c * kChunk); });
    });
  };
  for_each_sum([&](int r, Chunk& sum, const float* so_far) __attribute__((always_inline)) {
    sum = {load(so_far) * factors[r], load(so_far + kWidth) * factors[r]};
  });
  auto add_step = [&](int64_t t, auto load_values, auto load_operand) __attribute__((always_inline)) {
    typename P::Value value[kChunks];
    unrolled<kChunks>([&](auto c) __attribute__((always_inline)) {
      value[c] = load_values(d + c * kChunk, c + 1 < kChunks ? kChunk : chunk);
    });
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      const auto weight = load_operand(weights + r * kTile + t);
      unrolled<kChunks>([&](auto c) __attribute__((always_inline)) { P::add_value(sums[r][c], value[c], weight); });
    });
  };
  auto add_one = [&](int64_t t, auto load_operand) __attribute__((always_inline)) {
    const auto* row = values[t];
    add_step(t, [&](int64_t at, int n) { return P::load_value(row + at, n); }, load_operand);
  };
  // Of kPair tokens.
  auto add_pair = [&](int64_t t) __attribute__((always_inline)) {
    if constexpr (P::kPair == 1) {
      add_one(t, P::load_operand);
    } else {
      const auto *first = values[t], *second = values[t + 1];
      add_step(t, [&](int64_t at, int n) { return P::load_values(first + at, second + at, n); }, P::load_operand);
    }
  };
  constexpr int kGroup = Fetch<typename P::Element>::kGroup;
  // Rows of a request, so that finding them is a small part of it.
  constexpr int kElements = kChunks * kChunk, kLines = P::kPair * kElements * sizeof(typename P::Element) / 64;
  constexpr int kCount = kLines > 1 ? P::kPair : kGroup;
  const auto pass = fetch.template pass<kElements>(d, end - begin);
  for (int64_t t = begin; t < end; t += kGroup) {
    const auto group = fetch.template group<kAsk>(values + begin, t - begin, pass);
    auto ask_and_add = [&](auto i) __attribute__((always_inline)) {
      if (i % kCount == 0) fetch.template beside<kAsk, kElements, kCount>(group, i, d);
      add_pair(t + i);
    };
    // With fewer rows unrolling gains nothing, and there are more of these loops: 0.7 of the code.
    if (kRows == 4 && end - t >= kGroup) {
      unrolled<kGroup / P::kPair>(
          [&](auto i) __attribute__((always_inline)) { ask_and_add(std::integral_constant<int, i * P::kPair>{}); });
      continue;
    }
    const int count = static_cast<int>(std::min<int64_t>(kGroup, end - t));
    int i = 0;
    for (; i + P::kPair <= count; i += P::kPair) ask_and_add(i);
    if constexpr (P::kPair == 2) {
      if (i < count) add_one(t + i, P::load_last_operand);
    }
  }
  for_each_sum([&](int, const Chunk& sum, float* so_far) __attribute__((always_inline)) {
    store(so_far, sum.low);
    store(so_far + kWidth, sum.high);
  });
}

template <class P, int kRows, Ask kAsk, int kChunks = kSums / 2 / kRows>
void add_values(float* out, int64_t padded_dim, int64_t head_dim, const float* factors,
                const typename P::Weight* weights, const typename P::Element* const* values, int64_t begin, int64_t end,
                Fetch<typename P::Element> fetch, int64_t d = 0) {
  auto add = [&](int chunk) __attribute__((always_inline)) {
    add_value_chunks<P, kRows, kChunks, kAsk>(out, padded_dim, factors, weights, values, begin, end, d, chunk, fetch);
  };
  for (; d + kChunks * kChunk <= head_dim; d += kChunks * kChunk) add(kChunk);
  if (d + (kChunks - 1) * kChunk < head_dim) return add(static_cast<int>(head_dim - d) - (kChunks - 1) * kChunk);
  // What is left in one pass, too, as the fewer sums there are, the longer each multiply-add waits for the one before.
  if constexpr (kChunks > 1) {
    add_values<P, kRows, kAsk, kChunks - 1>(out, padded_dim, head_dim, factors, weights, values, begin, end, fetch, d);
  }
}

// Calls f(std::integral_constant<int, kRows>, first row) for rows in fours, and a pair and a single row at the end;
// three left over are taken as four, the last of them zero.
template <class F>
void for_row_groups(int64_t rows, F f) {
  int64_t r = 0;
  for (; rows - r >= 3; r += 4) f(std::integral_constant<int, 4>{}, r);
  if (rows - r == 2) f(std::integral_constant<int, 2>{}, r);
  if (rows - r == 1) f(std::integral_constant<int, 1>{}, r);
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
