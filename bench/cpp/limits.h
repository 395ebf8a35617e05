// What the machine can do at best, in the same work on the same memory, on all threads. Bytes are multiples of 64.
#pragma once

#include <cstdint>
#include <vector>

namespace limits {

// Reads pieces of memory of equal size, a multiple of 256, in their order and does nothing with them.
void read(const std::vector<const char*>& pieces, int64_t piece_bytes);

// memcpy, each thread one part of the whole.
void copy(char* to, const char* from, int64_t bytes);

// Multiply-adds on registers, in float32 or of pairs of bfloat16 where the CPU has them: 2 * `count` operations or a
// few more.
void multiply_add(int64_t count, bool bfloat16_pairs);

}  // namespace limits
