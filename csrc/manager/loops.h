// What the block manager does block by block and row by row, over arrays that it owns: see pool.py and tables.py, which
// say what the arrays mean.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace paged_kv::manager {

struct Dropped {
  int64_t num_shared_less = 0;  // blocks that had two holders
  int64_t tail = 0;             // of the queue, after what can still be found was put there
  std::vector<int32_t> freed;   // nobody holds or finds them any more
};

// One holder less for each of `ids`. The queue has room for them behind `tail`.
inline Dropped drop(const int32_t* ids, int64_t count, int32_t* refs, const uint8_t* cached, int32_t* queue,
                    int64_t* places, int64_t tail) {
  Dropped answer;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t block = ids[i], left = --refs[block];
    if (left == 1) ++answer.num_shared_less;
    if (left) continue;
    if (cached[block]) {
      queue[tail] = block;
      places[block] = tail++;
    } else {
      answer.freed.push_back(block);
    }
  }
  answer.tail = tail;
  return answer;
}

// Takes `count` true entries from the front, at `head`, of the queue of `size` places; returns the front after them, -1
// where there are not that many.
inline int64_t take_oldest(const int32_t* queue, int64_t size, int64_t* places, int64_t head, int64_t count,
                           int32_t* ids) {
  while (count) {
    if (head == size) return -1;
    const int32_t block = queue[head];
    if (places[block] == head) {
      places[block] = -1;
      *ids++ = block;
      --count;
    }
    ++head;
  }
  return head;
}

// Slots of positions [start, stop) of a sequence whose blocks from place start / block_size on are `blocks`.
inline void fill_slots(const int32_t* blocks, int64_t block_size, int64_t start, int64_t stop, int64_t* slots) {
  for (int64_t offset = start % block_size; start < stop; ++blocks, offset = 0) {
    const int64_t first = int64_t(*blocks) * block_size + offset;
    const int64_t count = std::min(block_size - offset, stop - start);
    for (int64_t i = 0; i < count; ++i) *slots++ = first + i;
    start += count;
  }
}

// Arrays of rows; [groups, rows] and [groups, rows, width] hold the groups' one behind the other.
struct Rows {
  int64_t* room;        // [rows]
  int64_t* seq_len;     // [rows]
  int64_t* num_blocks;  // [rows]
  int64_t* next_slot;   // [groups, rows]
  int32_t* blocks;      // [groups, rows, width]
  int64_t num_rows, num_groups, width;
};

// One more token for each of the rows, all of which have room: [groups, count] slots.
inline void advance(const Rows& table, const int64_t* rows, int64_t count, int64_t* slots) {
  for (int64_t i = 0; i < count; ++i) {
    --table.room[rows[i]];
    ++table.seq_len[rows[i]];
  }
  for (int64_t group = 0; group < table.num_groups; ++group) {
    int64_t* next = table.next_slot + group * table.num_rows;
    for (int64_t i = 0; i < count; ++i) *slots++ = next[rows[i]]++;
  }
}

// Gives each of the rows, whose blocks are full, a new one: `taken`, [groups, count]. The tables are wide enough.
inline void add_blocks(const Rows& table, const int64_t* rows, int64_t count, const int32_t* taken,
                       int64_t block_size) {
  for (int64_t group = 0; group < table.num_groups; ++group) {
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = group * table.num_rows + rows[i];
      table.blocks[at * table.width + table.num_blocks[rows[i]]] = *taken;
      table.next_slot[at] = int64_t(*taken++) * block_size;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    ++table.num_blocks[rows[i]];
    table.room[rows[i]] = block_size;
  }
}

}  // namespace paged_kv::manager
