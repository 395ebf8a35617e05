// How a batch becomes items of work that threads pull in any order. The cut follows from each sequence alone, so that
// no bit of a result depends on the batch, on the number of threads or on who ran what; only how many heads an item
// takes looks at the whole, since heads do not mix.
//   few rows  (decode):  item = split of kSplit keys x heads. The last of a sequence's splits to end merges them in
//   order. many rows (prefill): item = tile of query rows x one head, over all of their keys.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include "cpu/attention_tile.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

inline constexpr int64_t kSplit = 512;      // keys: a multiple of kTile; about 20 us of decode at D = 128, group 4
inline constexpr int64_t kDecodeRows = 16;  // rows of a group up to which packing keys and values does not pay
inline constexpr int64_t kPrefillRows =
    192;  // rows that share a packed tile; with it they fill some 300 KiB of L2 at D = 128
inline constexpr int64_t kDecodeState = 1 << 16;  // floats of query and output of an item's heads, which stay in L2
inline constexpr int64_t kItemsPerThread = 4;     // so that threads end at about the same time
static_assert(kSplit % kTile == 0, "a tile lies in one split");

// Carves arrays out of one allocation. Over a null base it only counts. Under AddressSanitizer nobody may touch what
// lies between arrays, so that one read or written beyond its end shows, though the next follows.
class Arena {
 public:
  static constexpr size_t kAlignment = 64;

  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <class T>
  T* take(int64_t count) {
    T* p = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    const size_t end = used_ + static_cast<size_t>(count) * sizeof(T);
    used_ = (end + kAlignment - 1) / kAlignment * kAlignment;
#ifdef __SANITIZE_ADDRESS__
    used_ += kAlignment;
    if (base_ != nullptr) ASAN_POISON_MEMORY_REGION(base_ + end, used_ - end);
#endif
    return p;
  }
  size_t used() const { return used_; }

 private:
  char* base_;
  size_t used_ = 0;
};

struct SequencePlan {
  SequenceView view;
  bool is_decode;
  int64_t first_part, num_parts;       // splits with visible keys, or tiles of query tokens; at least one
  int64_t heads_per_item;              // kv heads
  int64_t first_partial, first_count;  // where its results lie in the workspace, if it has several splits
};

struct WorkItem {
  int64_t seq;   // index into the plans
  int64_t part;  // split, or tile of query tokens
  int64_t head_begin, head_end;
};

// Results of splits, until they are merged.
struct Workspace {
  SoftmaxState* states;
  float* values;
  std::atomic<int32_t>* counts;  // splits ended, for each group of heads

  // Whether this was the last of the splits of these heads to end; if so, it sees what the others wrote.
  bool is_last(const SequencePlan& plan, const WorkItem& item) const {
    auto& count = counts[plan.first_count + item.head_begin / plan.heads_per_item];
    return count.fetch_add(1, std::memory_order_acq_rel) + 1 == plan.num_parts;
  }
};

inline int64_t tokens_per_tile(const AttentionParams& p) {
  return std::max<int64_t>(1, kPrefillRows / (p.num_q_heads / p.num_kv_heads));
}

// Heads of a block lie next to each other, rather than blocks of a head.
inline bool heads_are_neighbours(const CacheView& cache) { return cache.stride_head <= cache.stride_block; }

inline SequencePlan plan_sequence(const AttentionParams& p, int64_t seq) {
  const int64_t group = p.num_q_heads / p.num_kv_heads, begin = p.query_start_loc[seq];
  SequencePlan plan{};
  plan.view = {seq, p.seq_lens[seq], begin, p.query_start_loc[seq + 1] - begin};
  const int64_t query_len = plan.view.query_len;
  plan.is_decode = query_len <= 1 || query_len * group <= kDecodeRows;
  plan.heads_per_item = 1;
  if (query_len == 0) return plan;
  if (!plan.is_decode) {
    plan.num_parts = (query_len + tokens_per_tile(p) - 1) / tokens_per_tile(p);
    return plan;
  }
  const KeyRange keys = plan.view.visible_keys(p, 0, query_len);
  plan.num_parts = 1;
  if (!keys.empty()) {
    plan.first_part = keys.begin / kSplit;
    plan.num_parts = (keys.end - 1) / kSplit + 1 - plan.first_part;
  }
  return plan;
}

}  // namespace paged_kv::cpu::PAGED_KV_ISA
