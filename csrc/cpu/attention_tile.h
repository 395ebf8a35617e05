// What decode and prefill share about one tile: kTile neighbouring keys of one sequence. Tiles start at multiples of
// kTile, so that what is computed for a row depends on its own sequence alone.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/attention_products.h"
#include "cpu/page_table.h"
#include "cpu/softmax_state.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

inline constexpr int kTile = 64;  // keys; their K and V at D = 128 in bfloat16 are 32 KiB, what an L1 holds

// Keys [begin, end) of a sequence, or of a tile. What a row sees is always one range.
struct KeyRange {
  int64_t begin, end;

  bool empty() const { return begin >= end; }
  bool operator==(const KeyRange&) const = default;
  KeyRange within(const KeyRange& other) const { return {std::max(begin, other.begin), std::min(end, other.end)}; }
};

// One sequence of the batch, and the rows of query it brings: row r = token * group + head within the group.
struct SequenceView {
  int64_t seq, seq_len, query_begin, query_len;

  int64_t position(int64_t token) const { return seq_len - query_len + token; }

  KeyRange visible_keys(const AttentionParams& p, int64_t token) const {
    const int64_t pos = position(token);
    return {p.window > 0 ? std::max<int64_t>(0, pos - p.window + 1) : 0, p.causal ? pos + 1 : seq_len};
  }

  // The keys that any of the tokens [begin, end) sees.
  KeyRange visible_keys(const AttentionParams& p, int64_t begin, int64_t end) const {
    return {visible_keys(p, begin).begin, visible_keys(p, end - 1).end};
  }
};

PAGED_KV_INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Calls f(std::integral_constant<int, i>) for every i below kCount. By recursion of templates, as GCC 12 unrolls loops
// too late to keep an array of vectors in registers: it clears and copies such an array in memory.
template <int kCount, class F>
PAGED_KV_INLINE void unrolled(F f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// How dot products of one row become scores.
struct ScoreRule {
  float factor;          // multiplies the dot product
  float softcap;         // 0: none
  float slope;           // 0: no ALiBi
  const float* k_scale;  // [keys of the tile], or null
  const float* v_scale;  // likewise; multiplies the weights, once their sum is taken
  float unit = 1.0f;     // of the dot products, where query rows are scaled

  // Whether scores are dot products times factors that all keys share.
  bool is_plain() const { return k_scale == nullptr && softcap == 0 && slope == 0; }

  // The rest of the rule, for the scores of keys i, i + 1, ..., the first key of the tile standing `distance` after the
  // query.
  PAGED_KV_INLINE Vec apply(Vec score, int i, float distance) const {
    if (k_scale != nullptr) score *= load(k_scale + i);
    if (softcap > 0) score = softcap * tanh(score / softcap);
    if (slope != 0) score += slope * (__builtin_convertvector(iota() + i, Vec) + distance);
    return score;
  }
};

inline bool varies_by_token(const ScaleView& scale) {
  return scale.data != nullptr && (scale.stride_block != 0 || scale.stride_slot != 0);
}

// The scale of a head, as far as it is the same for all of its tokens.
inline float head_scale(const ScaleView& scale, int64_t head) {
  return scale.data == nullptr || varies_by_token(scale) ? 1.0f : scale.data[head * scale.stride_head];
}

// Softmax weights times the scales of their values. Where values may be infinite, as those of e5m2 may, a product that
// rounding alone makes zero is the smallest normal number instead, as the least of weights is: infinity times it is
// infinite, as in exact arithmetic, and not NaN.
template <class P>
PAGED_KV_INLINE Vec scale_weights(Vec weight, Vec scale) {
  Vec product = weight * scale;
  if constexpr (std::is_same_v<typename P::Element, Float8E5M2>) {
    constexpr uint32_t kSmallestNormal = 0x00800000;
    const IntVec is_lost = (product == 0.0f) & (weight != 0.0f) & (scale != 0.0f);
    product = is_lost ? from_bits(bits_of(product) | kSmallestNormal) : product;
  }
  return product;
}

// Turns the dot products of one row with the keys of a tile into softmax weights, for those in `keys`, which is not
// empty and counts from the start of the tile; `distance` is the first key's position less the query's. Weights beside
// `keys` are zero as far as its vectors reach, and unspecified beyond. Returns what to multiply the row's values so far
// by.
template <class P>
float softmax_tile(SoftmaxState& state, float* scores, typename P::Weight* weights, const KeyRange& keys,
                   float distance, const ScoreRule& rule) {
  const int begin = static_cast<int>(keys.begin), end = static_cast<int>(keys.end);
  const int first = begin / kWidth * kWidth;
  // Selects v in the lanes that belong to `keys`, `other` beside them.
  auto select = [&](int i, Vec v, float other) __attribute__((always_inline)) {
    const IntVec key = iota() + i;
    return (key >= begin) & (key < end) ? v : splat(other);
  };
  const bool whole = first == begin && end % kWidth == 0;  // vectors

  Vec largest = splat(-kInfinity);
  IntVec not_a_number{};
  auto add_score = [&](int i, Vec score) __attribute__((always_inline)) {
    largest = max(score, largest);
    not_a_number |= score != score;
    store(scores + i, score);
  };
  auto dot_product = [&](int i) __attribute__((always_inline)) {
    Vec dot = load(scores + i);
    if constexpr (P::kScaled) dot *= rule.unit;
    return dot * rule.factor * P::kUnit;  // not factor * kUnit, which may overflow
  };
  if (whole && rule.is_plain()) {
    for (int i = first; i < end; i += kWidth) add_score(i, dot_product(i));
  } else {
    for (int i = first; i < end; i += kWidth) {
      const Vec score = rule.apply(dot_product(i), i, distance);
      add_score(i, select(i, score, -kInfinity));
    }
  }
  const float factor = state.advance(any(not_a_number) ? kNaN : reduce_max(largest));

  const float shift = shift_of(state.max);
  Vec sum{};
  for (int i = first; i < end; i += kWidth) {
    Vec weight = exp(load(scores + i) - shift);
    sum += weight;
    if (rule.v_scale != nullptr) {
      const Vec scale = load(rule.v_scale + i);
      weight = scale_weights<P>(weight, whole ? scale : select(i, scale, 0.0f));
    }
    P::store_weights(weights + i, weight);
  }
  state.sum += reduce_add(sum);
  return factor;
}

// The first tile of `keys`, of kKeys at most, and where its tokens lie; `multiple` as of PageTable::locate.
template <int kKeys>
KeyRange locate_tile(const AttentionParams& p, const SequenceView& view, const KeyRange& keys, int multiple,
                     TokenOffsets<kKeys>& offsets) {
  const KeyRange tile{keys.begin, std::min(keys.end, (keys.begin / kKeys + 1) * kKeys)};
  if (!tile.empty()) {
    PageTable(p, view.seq).locate(tile.begin, static_cast<int>(tile.end - tile.begin), multiple, offsets);
  }
  return tile;
}

// Scales of the tokens of a tile, gathered for one head.
inline void gather_scales(const ScaleView& scale, const int64_t* offsets, int count, int64_t head, float* out) {
  for (int i = 0; i < count; ++i) out[i] = scale.data[offsets[i] + head * scale.stride_head];
}

template <class P>
constexpr bool kQuantised = sizeof(typename P::Element) == 1;

// Writes a row of values in lane order, times `factor` times `scale`, which may be too much for float32, to a row of
// the output: in the cache's dtype, unless that is quantised.
template <class P>
void write_row(const float* values, float factor, float scale, void* row, DType dtype, int64_t head_dim) {
  auto write = [&](auto* out) -> Error {
    for (int64_t i = 0; i < head_dim; i += kChunk) {
      // + 0: where prefill multiplies a value by a weight of zero, -0 from an underflow has become 0.
      const Vec low = load(values + i) + 0.0f, high = load(values + i + kWidth) + 0.0f;
      P::store_chunk(out + i, {low * factor * scale, high * factor * scale},
                     static_cast<int>(std::min<int64_t>(head_dim - i, kChunk)));
    }
    return nullptr;
  };
  if constexpr (kQuantised<P>) {
    dispatch_float(dtype, [&](auto tag) { return write(static_cast<Element<tag()>*>(row)); });
  } else {
    write(static_cast<typename P::Element*>(row));
  }
}

// Ends a row: its output and log-sum-exp, from all of its keys.
template <class P>
void finish_row(const AttentionParams& p, int64_t token, int64_t q_head, bool sees_a_key, const SoftmaxState& state,
                const float* values) {
  float factor = 0.0f, lse = -kInfinity;  // values are 0 where no key was seen
  if (sees_a_key) {
    state.finish(p.sinks != nullptr ? p.sinks[q_head] : -kInfinity, factor, lse);
    factor *= P::kUnit;
  }
  char* row = static_cast<char*>(p.out.data) +
              (token * p.out.stride_token + q_head * p.out.stride_head) * element_size(p.out.dtype);
  float scale = 1.0f;  // known to be 1 where the cache is not quantised
  if constexpr (kQuantised<P>) scale = head_scale(p.v_scale, q_head / (p.num_q_heads / p.num_kv_heads));
  write_row<P>(values, factor, scale, row, p.out.dtype, p.head_dim);
  p.lse[token * p.lse_stride_token + q_head * p.lse_stride_head] = lse;
}

inline const void* query_row(const AttentionParams& p, int64_t token, int64_t q_head) {
  return static_cast<const char*>(p.query.data) +
         (token * p.query.stride_token + q_head * p.query.stride_head) * element_size(p.query.dtype);
}

// The start of a head in a cache: TokenOffsets count from here.
template <class T>
const T* head_base(const CacheView& cache, int64_t head) {
  return static_cast<const T*>(cache.data) + head * cache.stride_head;
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
