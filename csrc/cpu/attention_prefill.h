// Attention of many rows over all of a sequence's keys: prefill and chunked prefill. The limit is arithmetic, so each
// tile of keys and values is converted and packed once for a tile of query rows, into panels of kPanel columns that the
// two products stream through: scores = query x keys and values += weights x values, both a register block of rows
// times one panel. Tiles, panels and rows that causality or a window hides are not computed.
//
// With vdpbf16ps (Zen 5, one thread, 256 tokens on 4,096 of D 128, 32/8 heads) the products take 83 % of the time,
// at 1.8 of the 2 a cycle that they reach out of L1, softmax 11 % and packing 5 %. Tried, and not held: blocks of 12
// rows, items of 384 rows (gains 3 % before the next tile was fetched, loses in float32), fetching the next block's
// sums into L1, and the queries, output and first tile of the next item into L2 (+2 % for 1,024 tokens, -1 % where they
// are there).
#pragma once

#include <cmath>

#include "cpu/attention_plan.h"
#include "cpu/attention_tile.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

inline constexpr float kLog2E = 1.44269504f;
inline constexpr int kPanel = 2 * kWidth;                                  // columns of a panel: two vectors
inline constexpr int kBlockRows = kWidth == 16 ? 8 : kWidth == 8 ? 6 : 4;  // x 2 vectors of sums, and operands beside
inline constexpr int kStripRows = 48;  // whose scores, weights and queries stay in L1 while panels pass
static_assert(kStripRows % kBlockRows == 0 && kStripRows % kWidth == 0);

template <class P>
inline constexpr int kTileKeys = kTile * P::kPair;  // the same bytes packed, whatever the policy

template <class P>
struct PrefillScratch {
  using Operand = typename P::Operand;

  Operand* query;               // [rows][padded_dim]
  float* values;                // [rows][padded_dim], in lane order
  float *max, *sum;             // [rows], as in SoftmaxState
  float* factors;               // [rows]
  KeyRange* keys;               // [rows]
  float* scores;                // [kStripRows][kTileKeys]
  typename P::Weight* weights;  // [kStripRows][kTileKeys]
  float* key_panels;            // [kTileKeys / kPanel][padded_dim / kPair][kPanel], lanes of 32 bits
  float* value_panels;          // [padded_dim / kPanel][kTileKeys / kPair][kPanel], lanes of 32 bits
  float *k_scale, *v_scale;     // [kTileKeys]
  TokenOffsets<kTileKeys<P>>*offsets, *next_offsets;  // of this tile and the next

  // rows: a multiple of kStripRows; 0 where nothing is for prefill, which takes no memory then.
  PrefillScratch(Arena& arena, int64_t rows, int64_t padded_dim)
      : query(arena.take<Operand>(rows * padded_dim)),
        values(arena.take<float>(rows * padded_dim)),
        max(arena.take<float>(rows)),
        sum(arena.take<float>(rows)),
        factors(arena.take<float>(rows)),
        keys(arena.take<KeyRange>(rows)),
        scores(arena.take<float>(std::min(rows, int64_t{kStripRows}) * kTileKeys<P>)),
        weights(arena.take<typename P::Weight>(std::min(rows, int64_t{kStripRows}) * kTileKeys<P>)),
        key_panels(arena.take<float>(padded_dim * kTileKeys<P> / P::kPair)),
        value_panels(arena.take<float>(padded_dim * kTileKeys<P> / P::kPair)),
        k_scale(arena.take<float>(rows > 0 ? kTileKeys<P> : 0)),
        v_scale(arena.take<float>(rows > 0 ? kTileKeys<P> : 0)),
        offsets(arena.take<TokenOffsets<kTileKeys<P>>>(rows > 0 ? 1 : 0)),
        next_offsets(arena.take<TokenOffsets<kTileKeys<P>>>(rows > 0 ? 1 : 0)) {}
};

// Transposes kWidth vectors in place, by exchanging ever smaller off-diagonal squares.
template <int kSide = kWidth / 2>
PAGED_KV_INLINE void transpose(Vec (&v)[kWidth]) {
  auto exchange = []<int... kLane>(Vec& a, Vec& b,
                                   std::integer_sequence<int, kLane...>) __attribute__((always_inline)) {
    // Lanes without kSide come from a, those with it from the same lanes of the partner, shifted.
    const Vec upper = __builtin_shufflevector(a, b, ((kLane & kSide) ? kLane - kSide + kWidth : kLane)...);
    b = __builtin_shufflevector(a, b, ((kLane & kSide) ? kLane + kWidth : kLane + kSide)...);
    a = upper;
  };
  for (int i = 0; i < kWidth; ++i) {
    if ((i & kSide) == 0) exchange(v[i], v[i + kSide], std::make_integer_sequence<int, kWidth>{});
  }
  if constexpr (kSide > 1) transpose<kSide / 2>(v);
}

PAGED_KV_INLINE void lanes_of_key(const Chunk& key, Vec (&lanes)[2]) {
  lanes[0] = key.low;
  lanes[1] = key.high;
}
PAGED_KV_INLINE void lanes_of_key(const UintVec& key, Vec (&lanes)[1]) { lanes[0] = from_bits(key); }

// Packs the keys of a tile, transposed: panel [d / kPair][token].
template <class P>
void pack_keys(const typename P::Element* key_head, const int64_t* offsets, int count, int64_t head_dim,
               float* panels) {
  constexpr int kVectors = P::kKeyVectors;
  const int64_t panel_size = round_up(head_dim, kChunk) / P::kPair * kPanel;
  for (int t = 0; t < count; t += kWidth) {
    float* panel = panels + t / kPanel * panel_size + t % kPanel;
    for (int64_t d = 0; d < head_dim; d += kChunk) {
      const int chunk = static_cast<int>(std::min<int64_t>(head_dim - d, kChunk));
      Vec square[kVectors][kWidth];
      for (int i = 0; i < kWidth; ++i) {
        Vec lanes[kVectors];
        lanes_of_key(chunk == kChunk ? P::load_key(key_head + offsets[t + i] + d)
                                     : P::load_key(key_head + offsets[t + i] + d, chunk),
                     lanes);
        for (int v = 0; v < kVectors; ++v) square[v][i] = lanes[v];
      }
      for (int v = 0; v < kVectors; ++v) {
        transpose(square[v]);
        float* to = panel + (d / P::kPair + v * kWidth) * kPanel;
        for (int i = 0; i < kWidth; ++i) store(to + i * kPanel, square[v][i]);
      }
    }
  }
}

// Packs the values of a tile: panel [token / kPair][d]. A pair's second token beyond the tile is zero.
template <class P>
void pack_values(const typename P::Element* value_head, const int64_t* offsets, int count, int64_t head_dim,
                 float* panels) {
  constexpr int64_t kPanelSize = kTileKeys<P> / P::kPair * kPanel;
  for (int t = 0; t < count; t += P::kPair) {
    const auto* row = value_head + offsets[t];
    for (int64_t d = 0; d < head_dim; d += kChunk) {
      const int chunk = static_cast<int>(std::min<int64_t>(head_dim - d, kChunk));
      float* to = panels + d / kPanel * kPanelSize + t / P::kPair * kPanel;
      if constexpr (P::kPair == 1) {
        const auto value = chunk == kChunk ? P::load_value(row + d) : P::load_value(row + d, chunk);
        store(to, value.low);
        store(to + kWidth, value.high);
      } else {
        const auto value = t + 1 < count ? P::load_values(row + d, value_head + offsets[t + 1] + d, chunk)
                                         : P::load_value(row + d, chunk);
        store(to, from_bits(value.low));
        store(to + kWidth, from_bits(value.high));
      }
    }
  }
}

// sums[r] += left[r][kPair * s ...] * panel[s] over steps [begin, end), for kRows rows.
template <class P, int kRows>
PAGED_KV_INLINE void multiply(const typename P::Operand* left, int64_t left_stride, const float* panel, int64_t begin,
                              int64_t end, Chunk (&sums)[kRows]) {
  for (int64_t s = begin; s < end; ++s) {
    const Vec low = load(panel + s * kPanel), high = load(panel + s * kPanel + kWidth);
    unrolled<kRows>([&](auto r) __attribute__((always_inline)) {
      const auto operand = P::load_operand(left + r * left_stride + s * P::kPair);
      P::add_product(sums[r].low, low, operand);
      P::add_product(sums[r].high, high, operand);
    });
  }
}

// sum += weights . panel over the keys [begin, end) of one row, which may begin or end within a pair: then the hidden
// half of the pair's values is zeroed, as its weight is.
template <class P>
PAGED_KV_INLINE void multiply_ragged(const typename P::Operand* weights, const float* panel, int64_t begin, int64_t end,
                                     Chunk& sum) {
  if constexpr (P::kPair == 1) {
    multiply<P, 1>(weights, 0, panel, begin, end, reinterpret_cast<Chunk(&)[1]>(sum));
  } else {
    for (int64_t t = begin & ~int64_t{1}; t < end; t += 2) {
      const uint32_t visible = (t >= begin ? 0x0000ffffu : 0u) | (t + 1 < end ? 0xffff0000u : 0u);
      const float* pair = panel + t / 2 * kPanel;
      const auto operand = P::load_operand(weights + t);
      P::add_product(sum.low, bits_of(load(pair)) & visible, operand);
      P::add_product(sum.high, bits_of(load(pair + kWidth)) & visible, operand);
    }
  }
}

// scores = query . keys for kBlockRows rows, of which `row` is the first and strip_row its number in the strip, and one
// panel of keys.
template <class P>
void score_block(const PrefillScratch<P>& scratch, int64_t row, int64_t strip_row, int64_t padded_dim, int64_t panel) {
  // A chain of 128 sums had up to 2.3 times the error of PyTorch, chains of 32 have 0.8, and take no longer.
  constexpr int64_t kStepsPerSum = 32;
  const int64_t steps = padded_dim / P::kPair;
  float* scores = scratch.scores + strip_row * kTileKeys<P> + panel * kPanel;
  for (int64_t first = 0; first < steps; first += kStepsPerSum) {
    Chunk sums[kBlockRows];
    unrolled<kBlockRows>([&](auto r) __attribute__((always_inline)) { sums[r] = {Vec{}, Vec{}}; });
    multiply<P, kBlockRows>(scratch.query + row * padded_dim, padded_dim, scratch.key_panels + panel * (steps * kPanel),
                            first, std::min(steps, first + kStepsPerSum), sums);
    unrolled<kBlockRows>([&](auto r) __attribute__((always_inline)) {
      float* to = scores + r * kTileKeys<P>;
      if (first > 0) sums[r] = {sums[r].low + load(to), sums[r].high + load(to + kWidth)};
      store(to, sums[r].low);
      store(to + kWidth, sums[r].high);
    });
  }
}

// One tile of keys, as the rows of an item see it.
struct PrefillTile {
  const AttentionParams& p;
  const SequenceView& view;
  int64_t head, group, first_token;
  KeyRange keys;
  ScoreRule rule;     // but for the slope
  float unit;         // of scores that stay dot products, where that is all that the rule does; else 0
  KeyRange filled{};  // what scratch.keys holds for all rows, if that is alike

  int count() const { return static_cast<int>(keys.end - keys.begin); }
  int64_t token(int64_t row) const { return first_token + row / group; }
  // In the tile.
  KeyRange visible_keys(int64_t token) const {
    const KeyRange seen = view.visible_keys(p, token).within(keys);
    return {seen.begin - keys.begin, seen.end - keys.begin};
  }
};

// Fetches the next tile into L2 while this one is computed, a few rows beside each block, since packing would wait for
// most lines of blocks that lie anywhere.
template <class P>
struct NextTile {
  static constexpr int kLine = 64;  // bytes

  const char *key_head, *value_head;
  const TokenOffsets<kTileKeys<P>>& offsets;
  int count, row_bytes, step;
  int done = 0;

  void fetch_some() {
    for (const int end = std::min(count, done + step); done < end; ++done) {
      const char* key = key_head + offsets.key[done] * static_cast<int64_t>(sizeof(typename P::Element));
      const char* value = value_head + offsets.value[done] * static_cast<int64_t>(sizeof(typename P::Element));
      for (int i = 0; i < row_bytes; i += kLine) {
        __builtin_prefetch(key + i, 0, 2);
        __builtin_prefetch(value + i, 0, 2);
      }
    }
  }
};

// As softmax_tile, for the rows of a strip at once: their maxima, sums and factors are lanes of vectors, which saves
// each row its own reductions, branches and scalar exponential; and all maxima come before all weights, so that no row
// waits for its maximum. kPlain: scores and maxima stay dot products, in tile.unit, since the compiler makes one
// rounding of the product and the difference in score * unit - max: of scores from 2^31 on, the largest would differ
// from itself by so much that its weight overflows. kWhole: all rows see all keys of a full tile. Weights of keys that
// a row does not see are zero.
template <class P, bool kPlain, bool kWhole>
void softmax_strip(const PrefillScratch<P>& scratch, const PrefillTile& tile, int64_t first_row, int64_t rows) {
  constexpr int kKeys = kTileKeys<P>, kGroups = kStripRows / kWidth;
  const ScoreRule& rule = tile.rule;
  const float to_power = kPlain ? tile.unit * kLog2E : kLog2E;
  const int groups = static_cast<int>((rows + kWidth - 1) / kWidth);

  struct Keys {
    int begin = 0, end = kKeys;

    // v in the lanes of these keys, `other` beside them.
    PAGED_KV_INLINE Vec select(int i, Vec v, float other) const {
      const IntVec key = iota() + i;
      return kWhole ? v : (key >= begin) & (key < end) ? v : splat(other);
    }
  };
  Keys keys[kStripRows], any_keys[kGroups];  // what a row sees; what any row of a group sees, in whole vectors
  for (int g = 0; g < groups; ++g) {
    if (kWhole) continue;
    KeyRange any_key{kKeys, 0};
    for (int r = g * kWidth; r < (g + 1) * kWidth; ++r) {
      const KeyRange& seen = scratch.keys[first_row + r];
      keys[r] = {static_cast<int>(seen.begin), static_cast<int>(seen.end)};
      if (!seen.empty()) any_key = {std::min(any_key.begin, seen.begin), std::max(any_key.end, seen.end)};
    }
    any_keys[g] = {static_cast<int>(any_key.begin / kWidth * kWidth), static_cast<int>(round_up(any_key.end, kWidth))};
  }

  Vec largest[kGroups][kWidth];
  for (int g = 0; g < groups; ++g) {
    const auto [begin, end] = kWhole ? Keys{} : any_keys[g];  // constants that the compiler sees
    for (int r = 0; r < kWidth; ++r) {
      const int row = g * kWidth + r;
      const Keys seen = keys[row];
      float* scores = scratch.scores + row * kKeys;
      Vec most = splat(-kInfinity);
      if constexpr (kPlain) {
        for (int i = begin; i < end; i += kWidth) most = max(seen.select(i, load(scores + i), -kInfinity), most);
      } else {
        ScoreRule rule_of_row = rule;
        float distance = 0.0f;
        if (tile.p.alibi_slopes != nullptr) {
          rule_of_row.slope = tile.p.alibi_slopes[tile.head * tile.group + (first_row + row) % tile.group];
          distance = static_cast<float>(tile.keys.begin - tile.view.position(tile.token(first_row + row)));
        }
        for (int i = begin; i < end; i += kWidth) {
          const Vec dot = load(scores + i) * rule.factor * P::kUnit;  // not factor * kUnit, which may overflow
          const Vec score = seen.select(i, rule_of_row.apply(dot, i, distance), -kInfinity);
          store(scores + i, score);
          most = max(score, most);
        }
      }
      largest[g][r] = most;
    }
  }

  // SoftmaxState::advance. NaN among the scores shows in the sums.
  Vec maxima[kGroups], factors[kGroups];
  float shifts[kStripRows];
  for (int g = 0; g < groups; ++g) {
    const Vec tile_max = max_each(largest[g]);
    const Vec old = load(scratch.max + first_row + g * kWidth);
    maxima[g] = tile_max > old ? tile_max : old;
    const Vec shift = maxima[g] == -kInfinity ? splat(0.0f) : maxima[g];
    factors[g] = maxima[g] == old ? splat(1.0f) : exp2((old - shift) * to_power);
    store(shifts + g * kWidth, shift);
  }

  Vec sums[kGroups][kWidth];
  const int all = kWhole ? kKeys : static_cast<int>(round_up(tile.count(), kWidth));
  for (int g = 0; g < groups; ++g) {
    for (int r = 0; r < kWidth; ++r) {
      const int row = g * kWidth + r;
      const Keys seen = keys[row];
      const float* scores = scratch.scores + row * kKeys;
      auto* weights = scratch.weights + row * kKeys;
      const float shift = shifts[row];
      Vec sum{};
      for (int i = 0; i < all; i += kWidth) {
        Vec weight{};
        if (kWhole || (i >= any_keys[g].begin && i < any_keys[g].end)) {
          Vec power = (load(scores + i) - shift) * to_power;
          if constexpr (kPlain) power = seen.select(i, power, -kInfinity);
          weight = exp2(power);
          sum += weight;
          if (!kPlain && rule.v_scale != nullptr) {
            weight = scale_weights<P>(weight, seen.select(i, load(rule.v_scale + i), 0.0f));
          }
        }
        P::store_weights(weights + i, weight);
      }
      sums[g][r] = sum;
    }
  }

  for (int g = 0; g < groups; ++g) {
    const Vec old = load(scratch.sum + first_row + g * kWidth);
    const Vec total = old * factors[g] + sum_each(sums[g]);
    for (int r = 0; any(total != total) && r < kWidth; ++r) {  // from NaN, or from infinity less itself?
      IntVec not_a_number{};
      for (int i = any_keys[g].begin; i < any_keys[g].end; i += kWidth) {
        Vec score = load(scratch.scores + (g * kWidth + r) * kKeys + i);
        if constexpr (kPlain) score = keys[g * kWidth + r].select(i, score, 0.0f);
        not_a_number |= score != score;
      }
      if (any(not_a_number)) maxima[g][r] = kNaN;
    }
    store(scratch.max + first_row + g * kWidth, maxima[g]);
    store(scratch.sum + first_row + g * kWidth, total);
    store(scratch.factors + first_row + g * kWidth, factors[g]);
  }
}

// values = values * factors + weights . values of the tile, for kBlockRows rows and one panel of the head dimension.
// The rows see the keys `seen`; where `ragged`, some of them only a part, and must not multiply the others' values,
// which are infinite or NaN.
template <class P>
void value_block(const PrefillScratch<P>& scratch, int64_t row, int64_t strip_row, int64_t padded_dim, int64_t panel,
                 KeyRange seen, bool ragged) {
  constexpr int kKeys = kTileKeys<P>;
  const KeyRange* keys = scratch.keys + row;
  const float* values_panel = scratch.value_panels + panel * (kKeys / P::kPair * kPanel);
  const auto* weights = scratch.weights + strip_row * kKeys;
  float* values = scratch.values + row * padded_dim + panel * kPanel;
  KeyRange common{seen.begin / P::kPair * P::kPair, round_up(seen.end, P::kPair)};  // whole pairs
  if (ragged) {
    common = seen;
    for (int r = 0; r < kBlockRows; ++r) common = common.within(keys[r]);
    common = {round_up(common.begin, P::kPair), common.end / P::kPair * P::kPair};
    if (common.empty()) common = {kKeys, kKeys};
  }
  Chunk sums[kBlockRows];
  unrolled<kBlockRows>([&](auto r) __attribute__((always_inline)) {
    const float* old = values + r * padded_dim;
    const float factor = scratch.factors[row + r];
    sums[r] = {load(old) * factor, load(old + kWidth) * factor};
  });
  multiply<P, kBlockRows>(weights, kKeys, values_panel, common.begin / P::kPair, common.end / P::kPair, sums);
  unrolled<kBlockRows>([&](auto r) __attribute__((always_inline)) {
    float* to = values + r * padded_dim;
    store(to, sums[r].low);
    store(to + kWidth, sums[r].high);
  });
  if (!ragged) return;
  for (int r = 0; r < kBlockRows; ++r) {
    if (keys[r].empty() || keys[r] == common) continue;
    float* to = values + r * padded_dim;
    Chunk sum{load(to), load(to + kWidth)};
    multiply_ragged<P>(weights + r * kKeys, values_panel, keys[r].begin, std::min(keys[r].end, common.begin), sum);
    multiply_ragged<P>(weights + r * kKeys, values_panel, std::max(keys[r].begin, common.end), keys[r].end, sum);
    store(to, sum.low);
    store(to + kWidth, sum.high);
  }
}

// Whether a tile's packed values are finite, so that weights of zero are as good as leaving them out.
template <class P>
bool values_are_finite(const PrefillScratch<P>& scratch, int count, int64_t padded_dim) {
  constexpr uint32_t kHigh = 0x7f800000u, kLow = 0x7f80u;
  IntVec infinite{};
  for (int64_t d = 0; d < padded_dim; d += kPanel) {
    const float* panel = scratch.value_panels + d * (kTileKeys<P> / P::kPair);
    for (int64_t i = 0; i < round_up(count, P::kPair) / P::kPair * kPanel; i += kWidth) {
      const UintVec bits = bits_of(load(panel + i));
      infinite |= (bits & kHigh) == kHigh;
      if (P::kPair == 2) infinite |= (bits & kLow) == kLow;
    }
  }
  return !any(infinite);
}

// One tile of keys for kStripRows rows, or up to the end of the item's `rows`.
template <class P>
void prefill_strip(const PrefillScratch<P>& scratch, const PrefillTile& tile, int64_t first_row, int64_t rows,
                   int64_t padded_dim, bool finite, NextTile<P>& next) {
  constexpr int kBlocks = kStripRows / kBlockRows;
  const int64_t strip_rows = std::min<int64_t>(kStripRows, rows - first_row);
  const KeyRange* strip_keys = scratch.keys + first_row;
  const bool whole = strip_keys[0].end == tile.count() && strip_keys[strip_rows - 1].begin == 0;  // all see all
  KeyRange seen[kBlocks];  // by any row of the block
  int blocks = 0;
  for (; blocks * kBlockRows < strip_rows; ++blocks) {
    const KeyRange* keys = strip_keys + blocks * kBlockRows;
    KeyRange any{0, tile.count()};
    if (!whole) {
      any = {kTileKeys<P>, 0};
      for (int r = 0; r < kBlockRows; ++r) {
        if (!keys[r].empty()) any = {std::min(any.begin, keys[r].begin), std::max(any.end, keys[r].end)};
      }
    }
    seen[blocks] = any;
  }

  for (int64_t panel = 0; panel * kPanel < tile.count(); ++panel) {
    for (int b = 0; b < blocks; ++b) {
      if (seen[b].within({panel * kPanel, (panel + 1) * kPanel}).empty()) continue;
      next.fetch_some();
      score_block<P>(scratch, first_row + b * kBlockRows, b * kBlockRows, padded_dim, panel);
    }
  }
  if (tile.unit == 0) {
    softmax_strip<P, false, false>(scratch, tile, first_row, strip_rows);
  } else if (whole && tile.count() == kTileKeys<P>) {
    softmax_strip<P, true, true>(scratch, tile, first_row, strip_rows);
  } else {
    softmax_strip<P, true, false>(scratch, tile, first_row, strip_rows);
  }
  for (int64_t panel = 0; panel * kPanel < padded_dim; ++panel) {
    for (int b = 0; b < blocks; ++b) {
      if (seen[b].empty()) continue;
      next.fetch_some();
      value_block<P>(scratch, first_row + b * kBlockRows, b * kBlockRows, padded_dim, panel, seen[b],
                     !whole && !finite);
    }
  }
}

// One tile of keys for all rows of the item; rows of the padding see what the last row sees.
template <class P>
void prefill_tile(PrefillTile& tile, int64_t rows, const KeyRange& next_keys, const PrefillScratch<P>& scratch) {
  using Element = typename P::Element;
  const AttentionParams& p = tile.p;
  const int64_t head = tile.head, padded_dim = round_up(p.head_dim, kChunk);
  const int count = tile.count();

  pack_keys<P>(head_base<Element>(p.key_cache, head), scratch.offsets->key, count, p.head_dim, scratch.key_panels);
  pack_values<P>(head_base<Element>(p.value_cache, head), scratch.offsets->value, count, p.head_dim,
                 scratch.value_panels);
  if (varies_by_token(p.k_scale)) {
    gather_scales(p.k_scale, scratch.offsets->k_scale, count, head, scratch.k_scale);
    tile.rule.k_scale = scratch.k_scale;
  }
  if (varies_by_token(p.v_scale)) {
    gather_scales(p.v_scale, scratch.offsets->v_scale, count, head, scratch.v_scale);
    tile.rule.v_scale = scratch.v_scale;
  }

  // A row sees no key that begins before those of the row before it, nor ends before.
  const int64_t last_token = tile.token(rows - 1), all_rows = round_up(rows, kStripRows);
  const KeyRange all{0, count};
  const bool whole = tile.visible_keys(tile.first_token).end == count && tile.visible_keys(last_token).begin == 0;
  if (whole) {
    if (tile.filled != all) std::fill_n(scratch.keys, all_rows, all);
    tile.filled = all;
  } else {
    for (int64_t r = 0, token = tile.first_token; token <= last_token; ++token) {
      const KeyRange seen = tile.visible_keys(token);
      const int64_t end = token == last_token ? all_rows : r + tile.group;
      for (; r < end; ++r) scratch.keys[r] = seen;
    }
    tile.filled = {};
  }
  const bool finite = whole || values_are_finite(scratch, count, padded_dim);
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows * ((count + padded_dim) / kPanel);
  const int next_count = static_cast<int>(next_keys.end - next_keys.begin);
  NextTile<P> next{reinterpret_cast<const char*>(head_base<Element>(p.key_cache, head)),
                   reinterpret_cast<const char*>(head_base<Element>(p.value_cache, head)),
                   *scratch.next_offsets,
                   next_count,
                   static_cast<int>(p.head_dim * sizeof(Element)),
                   static_cast<int>((next_count + blocks - 1) / std::max<int64_t>(1, blocks))};
  for (int64_t r = 0; r < rows; r += kStripRows) prefill_strip<P>(scratch, tile, r, rows, padded_dim, finite, next);
}

// The unit of scores that stay dot products; 0 where tokens have scales, ALiBi, a softcap, or a unit that float32
// cannot hold.
template <class P>
float unit_of_scores(const AttentionParams& p, const ScoreRule& rule) {
  const float unit = rule.factor * P::kUnit;
  const bool plain = rule.is_plain() && p.alibi_slopes == nullptr && !varies_by_token(p.k_scale) &&
                     !varies_by_token(p.v_scale) && unit > 0 && std::isnormal(unit) && std::isnormal(unit * kLog2E);
  return plain ? unit : 0.0f;
}

// One item of work: the tile of query tokens item.part, for the head item.head_begin.
template <class P>
void prefill_item(const AttentionParams& p, const SequencePlan& plan, const WorkItem& item,
                  PrefillScratch<P>& scratch) {
  const SequenceView& view = plan.view;
  const int64_t group = p.num_q_heads / p.num_kv_heads, head = item.head_begin;
  const int64_t first_token = item.part * tokens_per_tile(p);
  const int64_t last_token = std::min(view.query_len, first_token + tokens_per_tile(p));
  const int64_t rows = (last_token - first_token) * group, all_rows = round_up(rows, kStripRows);
  const int64_t padded_dim = round_up(p.head_dim, kChunk);

  for (int64_t r = 0; r < rows; ++r) {
    const void* row = query_row(p, view.query_begin + first_token + r / group, head * group + r % group);
    P::load_query(row, p.query.dtype, p.head_dim, scratch.query + r * padded_dim);
  }
  std::fill(scratch.query + rows * padded_dim, scratch.query + all_rows * padded_dim, typename P::Operand{});
  std::fill_n(scratch.values, all_rows * padded_dim, 0.0f);
  std::fill_n(scratch.max, all_rows, -kInfinity);
  std::fill_n(scratch.sum, all_rows, 0.0f);

  const KeyRange keys = view.visible_keys(p, first_token, last_token);
  const ScoreRule rule{p.scale * head_scale(p.k_scale, head), p.softcap, 0.0f, nullptr, nullptr};
  const float unit = unit_of_scores<P>(p, rule);
  PrefillTile tile{p, view, head, group, first_token, {keys.begin, keys.begin}, rule, unit};
  for (KeyRange next = locate_tile(p, view, keys, kWidth, *scratch.next_offsets); !next.empty();) {
    tile.keys = next;
    std::swap(scratch.offsets, scratch.next_offsets);
    next = locate_tile(p, view, {tile.keys.end, keys.end}, kWidth, *scratch.next_offsets);
    prefill_tile<P>(tile, rows, next, scratch);
  }

  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = first_token + r / group;
    finish_row<P>(p, view.query_begin + token, head * group + r % group, !view.visible_keys(p, token).empty(),
                  {unit == 0 ? scratch.max[r] : scratch.max[r] * unit, scratch.sum[r]},
                  scratch.values + r * padded_dim);
  }
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
