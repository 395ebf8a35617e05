// How decode has its keys and values come from memory while it computes.
#pragma once

#include <array>

#include "arch/registers.h"
#include "cpu/attention_tile.h"

namespace paged_kv::cpu::PAGED_KV_ISA {

// Where the rows lie that decode takes, in the order in which it takes them: a head's keys of a tile, its values, those
// of the next head, and on into the next tile or item of work. Nothing stands between them, so that a place some rows
// ahead is as many rows ahead in short sequences, too.
template <class T>
class RowOrder {
 public:
  static constexpr int kGroup = 4;          // a tile's keys, and its values, are made up to a multiple of this
  static constexpr int kReach = 2 * kTile;  // rows that there are beyond those of the first tile
  static constexpr int kKnown = kReach + 4 * kTile, kSize = kKnown + kReach;

  RowOrder(const AttentionParams& p, const T** rows) : p_(p), rows_(rows) {}

  // Of the first tile, which has `count` keys.
  const T* const* keys() const { return rows_ + begin_; }
  const T* const* values(int64_t count) const { return keys() + round_up(count, kGroup); }

  // Whether less than kReach is known beyond the first tile, of `count` keys.
  bool is_short(int64_t count) const { return end_ < begin_ + taken_by(count) + kReach; }

  void append(const TokenOffsets<kTile>& offsets, int64_t count, int64_t head) {
    if (end_ + taken_by(count) > kKnown) {
      std::copy(rows_ + begin_, rows_ + end_, rows_);
      filled_ = end_ -= begin_;
      begin_ = 0;
    }
    const int64_t size = round_up(count, kGroup);
    auto add = [&](const T* base, const int64_t* offsets) {
      for (int64_t i = 0; i < size; i += kGroup) {
        for (int j = 0; j < kGroup; ++j) rows_[end_ + i + j] = base + offsets[i + j];
      }
      end_ += size;
    };
    add(head_base<T>(p_.key_cache, head), offsets.key);
    add(head_base<T>(p_.value_cache, head), offsets.value);
    filled_ = std::max(filled_, end_);
  }
  // Where nothing is known to follow: requests for what is there cost nothing that a question whether to ask would not.
  void repeat_last(int64_t count) {
    const int64_t end = begin_ + taken_by(count) + kReach;
    if (filled_ < end) std::fill(rows_ + filled_, rows_ + end, rows_[end_ - 1]);
    filled_ = std::max(filled_, end);
  }
  void take(int64_t count) { begin_ += taken_by(count); }

 private:
  static int64_t taken_by(int64_t count) { return 2 * round_up(count, kGroup); }

  const AttentionParams& p_;
  const T** rows_;
  int64_t begin_ = 0, end_ = 0;  // of the rows that are known
  int64_t filled_ = 0;           // end of those that are known or repeated
};

// What a loop asks memory for: nothing, each row by where it lies, or groups of rows, which lie one after the other, by
// their first.
enum class Ask { kNothing, kRows, kGroups };

// Asks memory for rows, into L1, beside the work on others. Blocks lie anywhere, so the hardware does not see them
// coming: without, decode of scattered blocks takes 1.8 times as long.
//
// Rows are asked for in the order in which they are taken, each several times, nearer and nearer. A request that finds
// too many others under way is dropped (Zen 5: 3 % of a burst of 64 lines, 20 % of 512), and if it was the only one,
// the core waits for the line when it takes it. Shares of a plain read's speed (Zen 5, bfloat16, D 128, 16 x 2,048), at
// the faster and the slower of two speeds that the memory of a virtual machine had, in a C++ loop:
//   once, 18 KiB ahead                           0.69 / 0.72
//   4 times, 3, 6, 12 and 18 KiB ahead           0.92 / 0.84
//   5 times, 3, 6, 9, 15 and 21                  0.91 / 0.87
//   6 times, 3, 6, 9, 12, 15 and 21              0.87 / 0.89
// Asked for as they are taken, and not in the order of memory, lines take 1.05 of the time; two rows of them at once
// 1.02 where memory is slower. (From Python, 4 times take 0.96 of the time of 5 where memory is fast.) Tried, and not
// held, too: a tile of all heads ahead, into L2, with a non-temporal hint, and every second line. Each time costs some
// 0.08 ns a line; so bytes, which are converted beside it, are asked for less often, and so is all where vectors are
// narrow.
template <class T>
class Fetch {
 public:
  static constexpr int kGroup = RowOrder<T>::kGroup;

  explicit Fetch(const AttentionParams& p)
      : head_dim_(p.head_dim), unit_(unit_rows(p.head_dim * sizeof(T)) * sizeof(T*)) {}

  static Ask how(const AttentionParams& p) {
    const bool in_groups =
        p.block_size % kGroup == 0 && p.key_cache.stride_slot == p.head_dim && p.value_cache.stride_slot == p.head_dim;
    return in_groups ? Ask::kGroups : Ask::kRows;
  }

  // One of the passes over some rows, each of which takes kElements of every row.
  template <int kElements>
  struct Pass {
    uint64_t first;   // piece that is asked for beside the first kGroup rows; kElements of each of kGroup rows are one
    int shift;        // log2 of the pieces of kGroup rows
    uint64_t offset;  // elements
  };

  // The pass over `count` rows that begins at element d.
  template <int kElements>
  PAGED_KV_INLINE Pass<kElements> pass(uint64_t d, uint64_t count) const {
    const uint64_t passes = head_dim_ / kElements;
    // Rows in their order, which the hardware sees, too: the first pass asks for the first rows. Where that does not
    // divide, each pass asks for a share of every row.
    if (count > kGroup && passes * kElements == head_dim_ && (passes & (passes - 1)) == 0) {
      return {d / kElements * ((count + kGroup - 1) / kGroup), __builtin_ctzll(passes), 0};
    }
    return {0, 0, d * kGroup};
  }

  // What to ask for beside kGroup rows.
  struct Group {
    const T* const* rows;
    uint64_t offset;
  };

  // Beside rows[token] and those that follow it, token being a multiple of kGroup.
  template <Ask kAsk, int kElements>
  PAGED_KV_INLINE Group group(const T* const* rows, uint64_t token, const Pass<kElements>& pass) const {
    if constexpr (kAsk != Ask::kGroups) return {rows + token, 0};
    const uint64_t piece = pass.first + token / kGroup, group = piece >> pass.shift;
    return {rows + group * kGroup, pass.offset + (piece - (group << pass.shift)) * kGroup * kElements};
  }

  // Beside the elements [d, d + kElements) of kCount rows of a group, `token` being the first of them. Where a window
  // cuts blocks, or a sequence ends, some requests are for what is not taken.
  template <Ask kAsk, int kElements, int kCount>
  PAGED_KV_INLINE void beside(const Group& group, uint64_t token, uint64_t d) const {
    auto ask = [&](const T* const* ahead, uint64_t offset, int elements) __attribute__((always_inline)) {
      const int64_t unit = forget(unit_);
      for (const int times : kDistances) {
        const auto* place = reinterpret_cast<const char*>(ahead) + times * unit;
        const T* row = forget(*reinterpret_cast<const T* const*>(place) + offset);
        for (int i = 0; i < elements; i += kLine) __builtin_prefetch(row + i);
      }
    };
    if constexpr (kAsk == Ask::kGroups) {
      const uint64_t offset = group.offset + token * kElements;
      if (kCount * kElements < kLine && offset % kLine != 0) return;
      ask(group.rows, offset, kCount * kElements);
    } else if constexpr (kAsk == Ask::kRows) {
      if (kElements < kLine && d % kLine != 0) return;
      for (int r = 0; r < kCount; ++r) ask(group.rows + token + r, d, kElements);
    }
  }

  // Beside the chunk at d of two rows that are taken one after the other, rows being taken whole and `row_elements`
  // long, padding among it: of groups as much, in the order of memory.
  template <Ask kAsk, int kElements>
  PAGED_KV_INLINE void beside_pair(const Group& group, uint64_t token, uint64_t d, uint64_t row_elements) const {
    const uint64_t piece = token * (row_elements / kElements) + 2 * (d / kElements);
    beside<kAsk, kElements, 2>(group, kAsk == Ask::kGroups ? piece : token, d);
  }

 private:
  static constexpr int kLine = 64 / sizeof(T);  // elements
  static constexpr bool kWide = kWidth == 16;
  // How far ahead a row is asked for, in units.
  static constexpr auto distances() {
    if constexpr (kWide) {
      if constexpr (sizeof(T) == 4) {
        return std::array{1, 2, 3, 5, 7};
#ifdef __AVX512BF16__
      } else if constexpr (std::is_same_v<T, BFloat16>) {  // of which products leave most time
        return std::array{1, 2, 3, 5, 7};
#endif
      } else if constexpr (sizeof(T) == 2) {
        return std::array{1, 2, 4, 6};
      } else {
        return std::array{1, 3};
      }
    } else {
      if constexpr (sizeof(T) == 4) {
        return std::array{2, 4, 6};
      } else if constexpr (sizeof(T) == 2) {
        return std::array{3, 6};
      } else {
        return std::array{3};
      }
    }
  }
  static constexpr auto kDistances = distances();
  static constexpr int64_t kUnit = 3 << 10;  // bytes; seven of them are less than half of an L1

  // A unit in whole groups of rows.
  static int64_t unit_rows(int64_t row_bytes) {
    const int64_t rows = (kUnit / row_bytes + kGroup / 2) / kGroup * kGroup;
    constexpr int64_t kMost = RowOrder<T>::kReach / kDistances.back() / kGroup * kGroup;
    return std::clamp<int64_t>(rows, kGroup, kMost);
  }

  uint64_t head_dim_;
  int64_t unit_;  // bytes of a RowOrder
};

}  // namespace paged_kv::cpu::PAGED_KV_ISA
