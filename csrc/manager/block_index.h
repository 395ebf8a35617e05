// Which cached block holds the content that a digest names: a hash table over arrays that its user owns.
#pragma once

#include <cstdint>
#include <cstring>

#include "manager/sha256.h"

namespace paged_kv::manager {

// Open addressing with linear probing. A slot holds a tag, which tells where its entry would like to be, above block +
// 1, or 0 where it is empty; what the entry is found by stands with the block. Entries are taken out by moving those
// behind them up, so that a look-up never passes a grave. Each look-up costs two cache lines, and both can be asked for
// ahead.
struct BlockIndex {
  uint64_t* slots;  // [mask + 1], a power of two of at most 2^32, more than there are blocks
  uint64_t mask;
  uint8_t* digests;  // [num_blocks, DIGEST_BYTES] of each block's content
  uint8_t* parents;  // [num_blocks, DIGEST_BYTES] the digest of what precedes it
  uint8_t* groups;   // [num_blocks] the group of layers that it belongs to
  uint8_t* cached;   // [num_blocks] 1 where the index has the block

  // Digests are random already; groups with the same text must not start at the same slot.
  static uint32_t tag(int group, const uint8_t* digest) {
    uint32_t bits;
    std::memcpy(&bits, digest, sizeof(bits));
    return bits + uint32_t(group) * 0x9e3779b9u;
  }

  static uint64_t entry(uint32_t tag, int32_t block) { return uint64_t(tag) << 32 | uint64_t(block + 1); }
  static uint32_t tag_of(uint64_t entry) { return uint32_t(entry >> 32); }
  static int32_t block_of(uint64_t entry) { return int32_t(uint32_t(entry)) - 1; }

  const uint8_t* digest_of(int32_t block) const { return digests + DIGEST_BYTES * block; }

  void prefetch(int group, const uint8_t* digest) const { __builtin_prefetch(slots + (tag(group, digest) & mask)); }
  void prefetch(int32_t block) const { __builtin_prefetch(digest_of(block)); }

  // The slot that holds the digest's block, or the empty one where it would go.
  uint64_t slot(int group, const uint8_t* digest) const {
    const uint32_t wanted = tag(group, digest);
    uint64_t place = wanted & mask;
    for (; slots[place]; place = (place + 1) & mask) {
      const int32_t block = block_of(slots[place]);
      if (tag_of(slots[place]) == wanted && groups[block] == group &&
          !std::memcmp(digest_of(block), digest, DIGEST_BYTES)) {
        break;
      }
    }
    return place;
  }

  // -1 where there is none.
  int32_t find(int group, const uint8_t* digest) const { return block_of(slots[slot(group, digest)]); }

  // Puts `block`, which is not cached, under a digest that is not there, in the slot found for it.
  void insert(uint64_t place, int group, const uint8_t* parent, const uint8_t* digest, int32_t block) {
    slots[place] = entry(tag(group, digest), block);
    std::memcpy(digests + DIGEST_BYTES * block, digest, DIGEST_BYTES);
    std::memcpy(parents + DIGEST_BYTES * block, parent, DIGEST_BYTES);
    groups[block] = uint8_t(group);
    cached[block] = 1;
  }

  // Takes out `block`, which is cached.
  void remove(int32_t block) {
    const uint32_t own = tag(groups[block], digest_of(block));
    uint64_t gap = own & mask;
    while (slots[gap] != entry(own, block)) gap = (gap + 1) & mask;
    for (uint64_t place = (gap + 1) & mask; slots[place]; place = (place + 1) & mask) {
      // What stands here may move up unless that would put it before its home.
      if (((place - tag_of(slots[place])) & mask) >= ((place - gap) & mask)) {
        slots[gap] = slots[place];
        gap = place;
      }
    }
    slots[gap] = 0;
    cached[block] = 0;
  }
};

}  // namespace paged_kv::manager
