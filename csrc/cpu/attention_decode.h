// Attention of a few rows over one split of a sequence's keys: decode, and the check of a few drafted tokens. The limit
// is memory, so each key and value is read from memory once.
#pragma once

#include "cpu/attention_decode_loops.h"
#include "cpu/attention_fetch.h"
#include "cpu/attention_int8.h"
#include "cpu/attention_plan.h"
#include "cpu/attention_tile.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

// What scores the rows that a policy of scaled query rows has no unit for.
template <class P>
struct FallbackOf {
  using type = P;
};
template <class P>
  requires P::kScaled
struct FallbackOf<P> {
  using type = typename P::Fallback;
};
template <class P>
using Fallback = typename FallbackOf<P>::type;

template <class P>
struct DecodeScratch {
  using Operand = typename P::Operand;
  using FallbackOperand = typename Fallback<P>::Operand;

  Operand* query;                              // [heads of the item][rows][padded_dim]
  float* values;                               // [heads of the item][rows][padded_dim], in lane order
  SoftmaxState* states;                        // [heads of the item][rows]
  float* scores;                               // [rows][kTile]
  typename P::Weight* weights;                 // [rows][kTile]
  float* factors;                              // [rows]
  float* query_units;                          // [heads of the item][rows], where query rows are scaled
  FallbackOperand* fallback_query;             // as query, where that has no unit
  KeyRange* keys;                              // [rows]
  float *k_scale, *v_scale;                    // [kTile]
  TokenOffsets<kTile>*offsets, *next_offsets;  // of this tile and the next
  const typename P::Element** rows;            // [RowOrder::kSize]

  // What policy Q, which is P or its fallback, multiplies keys by.
  template <class Q>
  const typename Q::Operand* query_of() const {
    if constexpr (std::is_same_v<Q, P>)
      return query;
    else
      return fallback_query;
  }

  // rows = padded_rows(...), summed over the heads of an item in `all_rows`.
  DecodeScratch(Arena& arena, int64_t all_rows, int64_t rows, int64_t padded_dim)
      : query(arena.take<Operand>(all_rows * padded_dim)),
        values(arena.take<float>(all_rows * padded_dim)),
        states(arena.take<SoftmaxState>(all_rows)),
        scores(arena.take<float>(rows * kTile)),
        weights(arena.take<typename P::Weight>(rows * kTile)),
        factors(arena.take<float>(rows)),
        query_units(arena.take<float>(P::kScaled ? all_rows : 0)),
        fallback_query(arena.take<FallbackOperand>(P::kScaled ? all_rows * padded_dim : 0)),
        keys(arena.take<KeyRange>(rows)),
        k_scale(arena.take<float>(kTile)),
        v_scale(arena.take<float>(kTile)),
        offsets(arena.take<TokenOffsets<kTile>>(1)),
        next_offsets(arena.take<TokenOffsets<kTile>>(1)),
        rows(arena.take<const typename P::Element*>(RowOrder<typename P::Element>::kSize)) {}
};

inline int64_t padded_rows(int64_t rows) { return rows % 4 == 3 ? rows + 1 : rows; }

// The query rows of one head, into scratch memory; those without a unit also into `fallback_query`.
template <class P>
void load_queries(const AttentionParams& p, const SequenceView& view, int64_t head, int64_t head_in_item,
                  DecodeScratch<P>& scratch) {
  const int64_t group = p.num_q_heads / p.num_kv_heads, rows = view.query_len * group;
  const int64_t padded_dim = round_up(p.head_dim, kChunk), first_row = head_in_item * padded_rows(rows);
  auto* query = scratch.query + first_row * padded_dim;
  for (int64_t r = 0; r < rows; ++r) {
    const void* row = query_row(p, view.query_begin + r / group, head * group + r % group);
    const float unit = P::load_query(row, p.query.dtype, p.head_dim, query + r * padded_dim);
    if constexpr (P::kScaled) {
      scratch.query_units[first_row + r] = unit;
      if (unit == kInfinity) {
        Fallback<P>::load_query(row, p.query.dtype, p.head_dim, scratch.fallback_query + (first_row + r) * padded_dim);
      }
    }
  }
  std::fill(query + rows * padded_dim, query + padded_rows(rows) * padded_dim, typename P::Operand{});
}

// How many rows of values to take before going on to the next where they take several passes, some 4 KiB: so that
// requests keep to the order of use. Passes over a whole tile take 1.06 of the time.
inline int64_t values_at_once(int64_t row_bytes) {
  int64_t rows = 8;
  while (rows < kTile && rows * row_bytes < 4096) rows *= 2;
  return rows;
}

// One tile of one head, whose rows are the first in `order`: scores, weights, values.
template <class P>
void decode_tile(const AttentionParams& p, const SequenceView& view, int64_t head, int64_t head_in_item,
                 const KeyRange& tile, const RowOrder<typename P::Element>& order, DecodeScratch<P>& scratch) {
  const int64_t group = p.num_q_heads / p.num_kv_heads, rows = view.query_len * group;
  const int64_t padded_dim = round_up(p.head_dim, kChunk), first_row = head_in_item * padded_rows(rows);
  const int count = static_cast<int>(tile.end - tile.begin);
  float* values = scratch.values + first_row * padded_dim;
  using Fetch = Fetch<typename P::Element>;
  const Fetch fetch(p);
  // f(how to fetch beside the work on row r): rows beyond the first take what these have fetched.
  const auto ask = [how = Fetch::how(p)](int64_t r, auto f) {
    if (r > 0) return f(std::integral_constant<Ask, Ask::kNothing>{});
    if (how == Ask::kGroups) return f(std::integral_constant<Ask, Ask::kGroups>{});
    f(std::integral_constant<Ask, Ask::kRows>{});
  };

  const float* query_units = scratch.query_units + first_row;
  const auto has_unit = [&](int64_t r) { return !P::kScaled || query_units[r] != kInfinity; };
  auto score = [&]<class Q>(Q, auto kRows, int64_t r) {
    const auto* query = scratch.template query_of<Q>() + (first_row + r) * padded_dim;
    ask(r, [&](auto kAsk) {
      score_rows<Q, kRows(), kAsk()>(query, padded_dim, p.head_dim, order.keys(), count, scratch.scores + r * kTile,
                                     fetch);
    });
  };
  for_row_groups(rows, [&](auto kRows, int64_t r) {
    const int64_t last = std::min<int64_t>(r + kRows(), rows);
    bool together = true;
    for (int64_t row = r; row < last; ++row) together = together && has_unit(row);
    if (together) return score(P{}, kRows, r);
    constexpr std::integral_constant<int, 1> kOne;
    for (int64_t row = r; row < last; ++row) has_unit(row) ? score(P{}, kOne, row) : score(Fallback<P>{}, kOne, row);
  });

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
    const int64_t token = r / group;
    const KeyRange seen = view.visible_keys(p, token).within(tile);
    scratch.keys[r] = {seen.begin - tile.begin, seen.end - tile.begin};
    if (seen.empty()) continue;
    if (p.alibi_slopes != nullptr) rule.slope = p.alibi_slopes[head * group + r % group];
    if (P::kScaled) rule.unit = has_unit(r) ? query_units[r] : 1.0f;
    scratch.factors[r] =
        softmax_tile<P>(scratch.states[first_row + r], scratch.scores + r * kTile, scratch.weights + r * kTile,
                        scratch.keys[r], static_cast<float>(tile.begin - view.position(token)), rule);
  }

  auto add = [&](auto kRows, int64_t r) {
    const KeyRange seen = scratch.keys[r];
    static constexpr float kOnes[4] = {1, 1, 1, 1};
    const bool one_pass = kRows() * padded_dim <= kSums * kWidth;
    const int64_t step = one_pass ? kTile : values_at_once(p.head_dim * sizeof(typename P::Element));
    ask(r, [&](auto kAsk) {
      for (int64_t t = seen.begin; t < seen.end; t += step) {
        add_values<P, kRows(), kAsk()>(values + r * padded_dim, padded_dim, p.head_dim,
                                       t == seen.begin ? scratch.factors + r : kOnes, scratch.weights + r * kTile,
                                       order.values(count), t, std::min(seen.end, t + step), fetch);
      }
    });
  };
  for_row_groups(rows, [&](auto kRows, int64_t r) {
    const int64_t last = std::min<int64_t>(r + kRows(), rows);
    const bool alike = std::all_of(scratch.keys + r, scratch.keys + last,
                                   [&](const KeyRange& keys) { return keys == scratch.keys[r]; });
    if (alike) return add(kRows, r);
    // A value that a row does not see must not be multiplied, not even by zero: it may be NaN.
    for (int64_t row = r; row < last; ++row) add(std::integral_constant<int, 1>{}, row);
  });
}

// The keys of a split that its sequence's queries see.
inline KeyRange keys_of_split(const AttentionParams& p, const SequenceView& view, const WorkItem& item) {
  return view.visible_keys(p, 0, view.query_len).within({item.part * kSplit, (item.part + 1) * kSplit});
}

// An item of work and its sequence, or null.
struct PlannedItem {
  const SequencePlan* plan = nullptr;
  const WorkItem* item = nullptr;
};

// The heads [item.head_begin, item.head_end) over split item.part. Leaves states and values in scratch. Before the last
// tile, `claim_next()` tells the item that this thread does next, so that its first tile is fetched: one tile in eight
// would come from memory unasked for, which takes 3 to 8 % longer.
template <class P, class Claim>
void decode_split(const AttentionParams& p, const SequencePlan& plan, const WorkItem& item, DecodeScratch<P>& scratch,
                  Claim claim_next) {
  const SequenceView& view = plan.view;
  const int64_t group = p.num_q_heads / p.num_kv_heads, rows = view.query_len * group;
  const int64_t padded_dim = round_up(p.head_dim, kChunk), heads = item.head_end - item.head_begin;
  for (int64_t h = 0; h < heads; ++h) load_queries(p, view, item.head_begin + h, h, scratch);
  std::fill(scratch.weights + rows * kTile, scratch.weights + padded_rows(rows) * kTile, typename P::Weight{});
  std::fill(scratch.factors + rows, scratch.factors + padded_rows(rows), 1.0f);
  const int64_t all_rows = heads * padded_rows(rows);
  std::fill_n(scratch.values, all_rows * padded_dim, 0.0f);
  std::fill_n(scratch.states, all_rows, SoftmaxState{});

  const KeyRange keys = keys_of_split(p, view, item);
  // Heads run inside tiles: the heads of a block are neighbours in memory, unless the plan gave this item one head.
  using Order = RowOrder<typename P::Element>;
  Order order(p, scratch.rows);
  KeyRange next = locate_tile(p, view, keys, Order::kGroup, *scratch.next_offsets);
  int64_t known = item.head_begin;  // end of the heads of the tile whose rows are in `order`
  do {
    const KeyRange tile = next;
    std::swap(scratch.offsets, scratch.next_offsets);
    next = locate_tile(p, view, {tile.end, keys.end}, Order::kGroup, *scratch.next_offsets);
    KeyRange following = next;
    int64_t next_known = item.head_begin, next_end = item.head_end;
    if (next.empty()) {
      if (const PlannedItem after = claim_next(); after.item != nullptr && after.plan->is_decode) {
        const KeyRange its_keys = keys_of_split(p, after.plan->view, *after.item);
        following = locate_tile(p, after.plan->view, its_keys, Order::kGroup, *scratch.next_offsets);
        next_known = after.item->head_begin, next_end = after.item->head_end;
      }
    }
    if (tile.empty()) continue;
    if (following.empty()) next_end = next_known;
    const int64_t count = tile.end - tile.begin;
    for (int64_t head = item.head_begin; head < item.head_end; ++head) {
      while (order.is_short(count)) {
        if (known < item.head_end) {
          order.append(*scratch.offsets, count, known++);
        } else if (next_known < next_end) {
          order.append(*scratch.next_offsets, following.end - following.begin, next_known++);
        } else {
          order.repeat_last(count);
          break;
        }
      }
      decode_tile<P>(p, view, head, head - item.head_begin, tile, order, scratch);
      order.take(count);
    }
    known = next_known;
  } while (!next.empty());
}

// Where the splits of a sequence leave their results until the last one merges them.
template <class P>
class PartialStates {
 public:
  PartialStates(const AttentionParams& p, const SequencePlan& plan, const Workspace& workspace)
      : states_(workspace.states + plan.first_partial),
        padded_dim_(round_up(p.head_dim, kChunk)),
        values_(workspace.values + plan.first_partial * padded_dim_),
        rows_(plan.view.query_len * (p.num_q_heads / p.num_kv_heads)),
        heads_(p.num_kv_heads) {}

  SoftmaxState& state(int64_t split, int64_t head, int64_t row) const { return states_[index(split, head, row)]; }
  float* values(int64_t split, int64_t head, int64_t row) const {
    return values_ + index(split, head, row) * padded_dim_;
  }

 private:
  int64_t index(int64_t split, int64_t head, int64_t row) const { return (split * heads_ + head) * rows_ + row; }

  SoftmaxState* states_;  // [splits][num_kv_heads][rows]
  int64_t padded_dim_;
  float* values_;  // [splits][num_kv_heads][rows][padded_dim]
  int64_t rows_, heads_;
};

// One item of work: a split, and where it is the sequence's last to end, the output of its heads.
template <class P, class Claim>
void decode_item(const AttentionParams& p, const SequencePlan& plan, const WorkItem& item, const Workspace& workspace,
                 DecodeScratch<P>& scratch, Claim claim_next) {
  decode_split<P>(p, plan, item, scratch, claim_next);

  const SequenceView& view = plan.view;
  const int64_t group = p.num_q_heads / p.num_kv_heads, rows = view.query_len * group;
  const int64_t padded_dim = round_up(p.head_dim, kChunk);
  const PartialStates<P> partial(p, plan, workspace);
  auto for_each_row = [&](auto f) {
    for (int64_t head = item.head_begin; head < item.head_end; ++head) {
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t index = (head - item.head_begin) * padded_rows(rows) + r;
        f(head, r, scratch.states[index], scratch.values + index * padded_dim);
      }
    }
  };

  if (plan.num_parts > 1) {
    const int64_t split = item.part - plan.first_part;
    for_each_row([&](int64_t head, int64_t r, const SoftmaxState& state, const float* values) {
      partial.state(split, head, r) = state;
      std::copy_n(values, padded_dim, partial.values(split, head, r));
    });
    if (!workspace.is_last(plan, item)) return;
    // In the order of the splits, whoever ended last, so that the bits do not depend on it.
    for_each_row([&](int64_t head, int64_t r, SoftmaxState& state, float* values) {
      state = partial.state(0, head, r);
      std::copy_n(partial.values(0, head, r), padded_dim, values);
      for (int64_t i = 1; i < plan.num_parts; ++i) {
        float mine, theirs;
        state.merge(partial.state(i, head, r), mine, theirs);
        const float* other = partial.values(i, head, r);
        for (int64_t d = 0; d < padded_dim; d += kWidth) {
          store(values + d, fma(load(other + d), splat(theirs), load(values + d) * mine));
        }
      }
    });
  }
  for_each_row([&](int64_t head, int64_t r, const SoftmaxState& state, const float* values) {
    const int64_t token = r / group;
    finish_row<Fallback<P>>(p, view.query_begin + token, head * group + r % group, !view.visible_keys(p, token).empty(),
                            state, values);
  });
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
