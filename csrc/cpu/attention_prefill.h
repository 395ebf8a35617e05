// Attention of many rows over all of a sequence's keys: prefill and chunked prefill. The limit is arithmetic, so each
// tile of keys and values is converted and packed once for a tile of query rows, into panels of kPanel columns that the
// two products stream through: scores = query x keys and values += weights x values, both a register block of rows
// times one panel. Tiles, panels and rows that causality or a window hides are not computed.
#pragma once

#include "cpu/attention_plan.h"
#include "cpu/attention_tile.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

inline constexpr int kPanel = 2 * kWidth;                                  // columns of a panel: two vectors
inline constexpr int kBlockRows = kWidth == 16 ? 8 : kWidth == 8 ? 6 : 4;  // x 2 vectors of sums, and operands beside

template <class P>
struct PrefillScratch {
  using Operand = typename P::Operand;

  Operand* query;               // [rows][padded_dim]
  float* values;                // [rows][padded_dim], in lane order
  SoftmaxState* states;         // [rows]
  float* scores;                // [rows][kTile]
  typename P::Weight* weights;  // [rows][kTile]
  float* factors;               // [rows]
  KeyRange* keys;               // [rows]
  float* key_panels;            // [kTile / kPanel][padded_dim / kPair][kPanel], lanes of 32 bits
  float* value_panels;          // [padded_dim / kPanel][kTile / kPair][kPanel], lanes of 32 bits
  float *k_scale, *v_scale;     // [kTile]
  TokenOffsets<kTile>* offsets;

  PrefillScratch(Arena& arena, int64_t rows, int64_t padded_dim)
      : query(arena.take<Operand>(rows * padded_dim)),
        values(arena.take<float>(rows * padded_dim)),
        states(arena.take<SoftmaxState>(rows)),
        scores(arena.take<float>(rows * kTile)),
        weights(arena.take<typename P::Weight>(rows * kTile)),
        factors(arena.take<float>(rows)),
        keys(arena.take<KeyRange>(rows)),
        key_panels(arena.take<float>(padded_dim * kTile)),
        value_panels(arena.take<float>(padded_dim * kTile)),
        k_scale(arena.take<float>(kTile)),
        v_scale(arena.take<float>(kTile)),
        offsets(arena.take<TokenOffsets<kTile>>(1)) {}
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
  constexpr int64_t kPanelSize = kTile / P::kPair * kPanel;
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
    for (int r = 0; r < kRows; ++r) {
      const auto operand = P::load_operand(left + r * left_stride + s * P::kPair);
      P::add_product(sums[r].low, low, operand);
      P::add_product(sums[r].high, high, operand);
    }
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

// scores = query . keys for kBlockRows rows and one panel of keys.
template <class P>
void score_block(const PrefillScratch<P>& scratch, int64_t row, int64_t padded_dim, int64_t panel) {
  // A chain of 128 sums had up to 2.3 times the error of PyTorch, chains of 32 have 0.8, and take no longer.
  constexpr int64_t kStepsPerSum = 32 / P::kPair;
  const int64_t steps = padded_dim / P::kPair;
  Chunk sums[kBlockRows]{};
  for (int64_t first = 0; first < steps; first += kStepsPerSum) {
    Chunk part[kBlockRows]{};
    multiply<P, kBlockRows>(scratch.query + row * padded_dim, padded_dim, scratch.key_panels + panel * (steps * kPanel),
                            first, std::min(steps, first + kStepsPerSum), part);
    for (int r = 0; r < kBlockRows; ++r) {
      sums[r].low += part[r].low;
      sums[r].high += part[r].high;
    }
  }
  for (int r = 0; r < kBlockRows; ++r) {
    store(scratch.scores + (row + r) * kTile + panel * kPanel, sums[r].low);
    store(scratch.scores + (row + r) * kTile + panel * kPanel + kWidth, sums[r].high);
  }
}

// values = values * factors + weights . values of the tile, for kBlockRows rows and one panel of the head dimension.
template <class P>
void value_block(const PrefillScratch<P>& scratch, int64_t row, int64_t padded_dim, int64_t panel) {
  const KeyRange* keys = scratch.keys + row;
  const float* values_panel = scratch.value_panels + panel * (kTile / P::kPair * kPanel);
  const auto* weights = scratch.weights + row * kTile;
  Chunk sums[kBlockRows];
  for (int r = 0; r < kBlockRows; ++r) {
    const float* old = scratch.values + (row + r) * padded_dim + panel * kPanel;
    sums[r] = {load(old) * scratch.factors[row + r], load(old + kWidth) * scratch.factors[row + r]};
  }
  // The keys that all rows see, in whole pairs ...
  KeyRange common{0, kTile};
  for (int r = 0; r < kBlockRows; ++r) common = common.within(keys[r]);
  common = {round_up(common.begin, P::kPair), common.end / P::kPair * P::kPair};
  if (common.empty()) common = {kTile, kTile};
  multiply<P, kBlockRows>(weights, kTile, values_panel, common.begin / P::kPair, common.end / P::kPair, sums);
  for (int r = 0; r < kBlockRows; ++r) {
    float* to = scratch.values + (row + r) * padded_dim + panel * kPanel;
    store(to, sums[r].low);
    store(to + kWidth, sums[r].high);
  }
  // ... and what some see beside them: a value that a row does not see must not be multiplied, as it may be NaN.
  for (int r = 0; r < kBlockRows; ++r) {
    if (keys[r].empty() || keys[r] == common) continue;
    float* to = scratch.values + (row + r) * padded_dim + panel * kPanel;
    Chunk sum{load(to), load(to + kWidth)};
    multiply_ragged<P>(weights + r * kTile, values_panel, keys[r].begin, std::min(keys[r].end, common.begin), sum);
    multiply_ragged<P>(weights + r * kTile, values_panel, std::max(keys[r].begin, common.end), keys[r].end, sum);
    store(to, sum.low);
    store(to + kWidth, sum.high);
  }
}

// One tile of keys for all rows of the item; rows of the padding see no key.
template <class P>
void prefill_tile(const AttentionParams& p, const SequenceView& view, int64_t head, int64_t first_token, int64_t rows,
                  const KeyRange& tile, PrefillScratch<P>& scratch) {
  using Element = typename P::Element;
  const int64_t group = p.num_q_heads / p.num_kv_heads, all_rows = round_up(rows, kBlockRows);
  const int64_t padded_dim = round_up(p.head_dim, kChunk);
  const int count = static_cast<int>(tile.end - tile.begin);

  pack_keys<P>(head_base<Element>(p.key_cache, head), scratch.offsets->key, count, p.head_dim, scratch.key_panels);
  pack_values<P>(head_base<Element>(p.value_cache, head), scratch.offsets->value, count, p.head_dim,
                 scratch.value_panels);
  ScoreRule rule{p.scale * head_scale(p.k_scale, head), p.softcap, 0.0f, nullptr, nullptr};
  if (varies_by_token(p.k_scale)) {
    gather_scales(p.k_scale, scratch.offsets->k_scale, count, head, scratch.k_scale);
    rule.k_scale = scratch.k_scale;
  }
  if (varies_by_token(p.v_scale)) {
    gather_scales(p.v_scale, scratch.offsets->v_scale, count, head, scratch.v_scale);
    rule.v_scale = scratch.v_scale;
  }

  for (int64_t r = 0; r < rows; ++r) {
    const KeyRange seen = view.visible_keys(p, first_token + r / group).within(tile);
    scratch.keys[r] = {seen.begin - tile.begin, seen.end - tile.begin};
  }
  std::fill(scratch.keys + rows, scratch.keys + all_rows, KeyRange{0, 0});

  // A panel stays in L1 while all rows pass it.
  auto for_each_block = [&](auto f) {
    for (int64_t row = 0; row < all_rows; row += kBlockRows) {
      KeyRange any{kTile, 0};
      for (int64_t r = row; r < row + kBlockRows; ++r) {
        if (!scratch.keys[r].empty())
          any = {std::min(any.begin, scratch.keys[r].begin), std::max(any.end, scratch.keys[r].end)};
      }
      if (!any.empty()) f(row, any);
    }
  };
  for (int64_t panel = 0; panel * kPanel < count; ++panel) {
    for_each_block([&](int64_t row, const KeyRange& any) {
      if (!any.within({panel * kPanel, (panel + 1) * kPanel}).empty()) score_block<P>(scratch, row, padded_dim, panel);
    });
  }

  for (int64_t r = 0; r < all_rows; ++r) {
    scratch.factors[r] = 1.0f;
    if (scratch.keys[r].empty()) continue;
    if (p.alibi_slopes != nullptr) rule.slope = p.alibi_slopes[head * group + r % group];
    scratch.factors[r] =
        softmax_tile<P>(scratch.states[r], scratch.scores + r * kTile, scratch.weights + r * kTile, scratch.keys[r],
                        static_cast<float>(tile.begin - view.position(first_token + r / group)), rule);
  }

  for (int64_t panel = 0; panel * kPanel < padded_dim; ++panel) {
    for_each_block([&](int64_t row, const KeyRange&) { value_block<P>(scratch, row, padded_dim, panel); });
  }
}

// One item of work: the tile of query tokens item.part, for the head item.head_begin.
template <class P>
void prefill_item(const AttentionParams& p, const SequencePlan& plan, const WorkItem& item,
                  PrefillScratch<P>& scratch) {
  const SequenceView& view = plan.view;
  const int64_t group = p.num_q_heads / p.num_kv_heads, head = item.head_begin;
  const int64_t first_token = item.part * tokens_per_tile(p);
  const int64_t last_token = std::min(view.query_len, first_token + tokens_per_tile(p));
  const int64_t rows = (last_token - first_token) * group, all_rows = round_up(rows, kBlockRows);
  const int64_t padded_dim = round_up(p.head_dim, kChunk);

  for (int64_t r = 0; r < rows; ++r) {
    const void* row = query_row(p, view.query_begin + first_token + r / group, head * group + r % group);
    P::load_query(row, p.query.dtype, p.head_dim, scratch.query + r * padded_dim);
  }
  std::fill(scratch.query + rows * padded_dim, scratch.query + all_rows * padded_dim, typename P::Operand{});
  std::fill_n(scratch.values, all_rows * padded_dim, 0.0f);
  std::fill_n(scratch.states, all_rows, SoftmaxState{});

  const KeyRange keys = view.visible_keys(p, first_token, last_token);
  const PageTable table(p, view.seq);
  for (int64_t first = keys.begin; first < keys.end;) {
    const KeyRange tile{first, std::min(keys.end, (first / kTile + 1) * kTile)};
    table.locate(tile.begin, static_cast<int>(tile.end - tile.begin), kWidth, *scratch.offsets);
    prefill_tile<P>(p, view, head, first_token, rows, tile, scratch);
    first = tile.end;
  }

  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = first_token + r / group;
    finish_row<P>(p, view.query_begin + token, head * group + r % group, !view.visible_keys(p, token).empty(),
                  scratch.states[r], scratch.values + r * padded_dim);
  }
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
