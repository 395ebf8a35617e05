// How decode has its keys and values come from memory while it computes.
#pragma once

#include "arch/registers.h"
#include "cpu/attention_tile.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

// Where the rows of one head lie that decode takes, in the order in which it takes them: a tile's keys, its values,
// then those of the tile or the head that follows, kTile of each.
template <class T>
class RowOrder {
 public:
  // Rows, and how far past any row of the first tile they reach.
  static constexpr int kSize = 4 * kTile, kReach = kSize / 2;

  RowOrder(const AttentionParams& p, const T** rows) : p_(p), rows_(rows) {}

  const T* const* keys() const { return rows_; }
  const T* const* values() const { return rows_ + kTile; }

  void begin(const TokenOffsets<kTile>& offsets, int64_t head) { find(rows_, offsets, head); }
  void follow_by(const TokenOffsets<kTile>& offsets, int64_t head) { find(rows_ + 2 * kTile, offsets, head); }
  // Requests for what is there cost nothing that a question whether to ask would not.
  void follow_by_itself() { std::copy_n(rows_, 2 * kTile, rows_ + 2 * kTile); }
  void advance() { std::copy_n(rows_ + 2 * kTile, 2 * kTile, rows_); }

 private:
  void find(const T** rows, const TokenOffsets<kTile>& offsets, int64_t head) {
    auto find_rows = [](const T** rows, const T* base, const int64_t* offsets) {
      for (int i = 0; i < kTile; ++i) rows[i] = base + offsets[i];
    };
    find_rows(rows, head_base<T>(p_.key_cache, head), offsets.key);
    find_rows(rows + kTile, head_base<T>(p_.value_cache, head), offsets.value);
  }

  const AttentionParams& p_;
  const T** rows_;
};

// What a loop asks memory for: nothing, each row by where it lies, or groups of neighbours by their first.
enum class Ask { kNothing, kRows, kGroups };

// Asks memory for rows, into L1, beside the work on others. Blocks lie anywhere, so the hardware does not see them
// coming: without, decode of scattered blocks takes 1.8 times as long.
//
// Rows are asked for in the order in which they are taken, each several times, nearer and nearer. A request that finds
// too many others under way is dropped (Zen 5: 3 % of a burst of 64 lines, 20 % of 512), and if it was the only one,
// the core waits for the line when it takes it. Shares of a plain read's speed (Zen 5, D 128), by how often a row is
// asked for, at the faster and the slower of two speeds that the memory of a virtual machine had, in a C++ loop over 16
// x 2,048:
//             once, a tile of all heads ahead    twice         three times    four times     six times
//   bfloat16  0.77 / 0.76                        0.95 / 0.77   0.96 / 0.82    0.94 / 0.88
//   float32   0.61 / 0.71                        0.79 / 0.75                  0.87 / 0.78    0.92 / 0.80
// It costs up to a cycle a line; so bytes, which are converted beside it, are asked for less often, and so is all where
// vectors are narrow.
template <class T>
class Fetch {
 public:
  static constexpr int kGroup = 4;  // rows

  explicit Fetch(const AttentionParams& p)
      : stride_(p.key_cache.stride_slot),
        step_(std::min<int64_t>(kAhead / (p.head_dim * sizeof(T)), RowOrder<T>::kReach) / (kTimes * kGroup) * kGroup) {}

  static Ask how(const AttentionParams& p) {
    const bool in_groups = p.block_size % kGroup == 0 && p.key_cache.stride_slot == p.value_cache.stride_slot;
    return in_groups ? Ask::kGroups : Ask::kRows;
  }

  // Beside the elements [d, d + kElements) of the kCount rows from rows[token] on, token being a multiple of kCount.
  // Where a window cuts blocks, or a sequence ends, some requests are for rows that are not taken; none leaves `rows`,
  // as these begin at a tile's first or at a multiple of eight from there.
  template <Ask kAsk, int kElements, int kCount>
  PAGED_KV_INLINE void beside(const T* const* rows, int64_t token, int64_t d) const {
    if constexpr (kAsk != Ask::kNothing) {
      // Where a line takes several passes over all rows, they share the rows.
      constexpr int kBytes = kElements * sizeof(T), kPasses = kBytes < kLine ? kLine / kBytes : 1;
      constexpr int kShare = kCount > kPasses ? kCount / kPasses : 1;
      if (kPasses > kCount && token % kPasses != 0) return;
      const int64_t first = kPasses > 1 ? d / kElements % kPasses * kShare : 0;
      unrolled<kTimes>([&](auto i) __attribute__((always_inline)) {
        const T* const* ahead = rows + token + (kTimes - i) * step_;
        for (int r = 0; r < kShare; ++r) {
          // By the first of a group, as finding each row would take as long as asking for it.
          const T* row = kAsk == Ask::kGroups ? ahead[0] + (first + r) * stride_ : ahead[first + r];
          for (int l = 0; l < (kBytes + kLine - 1) / kLine; ++l) __builtin_prefetch(row + d + l * kLine / sizeof(T));
        }
      });
    }
  }

 private:
  static constexpr int kLine = 64;  // bytes
  static constexpr bool kWide = kWidth == 16;
  static constexpr int kTimes = sizeof(T) == 4 ? (kWide ? 6 : 3) : sizeof(T) == 2 ? (kWide ? 4 : 2) : (kWide ? 3 : 1);
  // Half of an L1, which is 48 KiB on cores with AVX-512.
  static constexpr int64_t kAhead = (kWide ? 24 : 16) << 10;  // bytes

  int64_t stride_;  // elements from a row to its neighbour
  int64_t step_;    // rows from one request for a row to the next, whole groups
};

}  // namespace paged_kv::cpu::PAGED_KV_ISA
