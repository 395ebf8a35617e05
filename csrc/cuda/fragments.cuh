// Tiles of keys, values and queries in shared memory, and the fragments of mma.m16n8k16 that are read from them. In all
// fragments g = lane / 4 and c = lane % 4, as in the PTX manual's figures.
#pragma once

#include <arch/ptx.cuh>
#include <cstdint>
#include <cstring>

#include "elements.cuh"

namespace paged_kv::cuda {

// Rows of kBytes bytes as 16-byte chunks, which stand in an order of their own in each row: 8 neighbouring rows have
// their equal chunks in 8 different groups of banks, and so have 2 neighbouring rows their first 4 chunks.
template <int kRows, int kBytes>
struct alignas(128) Tile {
  static constexpr int kChunks = kBytes / 16;
  static_assert(kChunks >= 4 && kBytes % 64 == 0, "a row is a multiple of 64 bytes");
  ptx::Words<16> chunk[kRows][kChunks];

  // Chunk column + lane_column of a row. Where `column` is a compile-time constant and the sum stays within its group
  // of chunks, columns of other groups lie a constant apart, so that few addresses have to be computed and kept.
  __device__ ptx::Words<16>* at(int row, int column, int lane_column = 0) {
    return &chunk[row][place(row, column, lane_column)];
  }
  __device__ const ptx::Words<16>* at(int row, int column, int lane_column = 0) const {
    return &chunk[row][place(row, column, lane_column)];
  }

 private:
  static constexpr int kGroup = kChunks < 8 ? 4 : 8;
  __device__ static int place(int row, int column, int lane_column) {
    const int order = kGroup == 4 ? row >> 1 & 3  // two rows share the 32 banks
                                  : (row & 1) << 2 | (row >> 1 & 3);
    return (column & -kGroup) + (((column & (kGroup - 1)) + lane_column) ^ order);
  }
};

// Two float32 as T, the first in the lower half.
template <class T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t bits;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&bits, &pair, sizeof(bits));
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&bits, &pair, sizeof(bits));
  }
  return bits;
}

namespace detail {
__device__ __forceinline__ __half2 as_half2(uint32_t bits) {
  __half2 pair;
  memcpy(static_cast<void*>(&pair), &bits, sizeof(pair));
  return pair;
}
__device__ __forceinline__ uint32_t as_bits(__half2 pair) {
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}
}  // namespace detail

// Bytes 2 * kPair and 2 * kPair + 1 of `bytes` as two float16. Exact: float16 has every number of these formats.
template <class Quantised, int kPair>
__device__ __forceinline__ uint32_t dequantise_pair(uint32_t bytes) {
  // Each byte as the upper half of a float16, below it zeros.
  const uint32_t upper = __byte_perm(bytes, 0, kPair == 0 ? 0x1404 : 0x3424);
  if constexpr (std::is_same_v<Quantised, Float8E5M2>) {
    return upper;  // which is what e5m2 is
  } else if constexpr (std::is_same_v<Quantised, Float8E4M3>) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const auto pair = static_cast<__nv_fp8x2_storage_t>(bytes >> (16 * kPair));
    return detail::as_bits(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)));
#else
    // The same bits as a float16 stand for 2^-8 of the value, subnormals included; all ones, NaN, gets float16's.
    const uint32_t is_nan = ((upper & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    const uint32_t half = (upper & 0x80008000u) | (upper & 0x7f007f00u) >> 1 | is_nan >> 1;
    return detail::as_bits(__hmul2(detail::as_half2(half), detail::as_half2(0x5c005c00u)));  // 256
#endif
  } else {
    // 0x64xx is 1024 + xx; with the sign bit flipped, xx is the value + 128.
    const uint32_t biased = __byte_perm(bytes ^ 0x80808080u, 0x64646464u, kPair == 0 ? 0x4140 : 0x4342);
    return detail::as_bits(__hsub2(detail::as_half2(biased), detail::as_half2(0x64806480u)));  // 1152
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Tensor-core operands. T is the type that is multiplied, Cache the type of the tile; where they differ, T is float16
// and Cache is quantised. Then the head's elements are multiplied in an order that lets a lane read 16 neighbouring
// bytes: in each 64 elements, step s of 4 has elements 16 * c + 4 * s + {0, 1} and {2, 3} in place of 2c + {0, 1} and
// 2c + 8 + {0, 1}, of queries and keys alike.

// How many steps of 16 of the head's elements are loaded together.
template <class T, class Cache>
inline constexpr int kStepsTogether = std::is_same_v<T, Cache> ? 1 : 4;

// Query fragments of 16 rows for the steps [kSteps * number, kSteps * (number + 1)).
template <class T, class Cache, int kSteps, int kRows, int kBytes>
__device__ __forceinline__ void load_query(uint32_t (&a)[kSteps][4], const Tile<kRows, kBytes>& tile, int first_row,
                                           int number, int lane) {
  if constexpr (std::is_same_v<T, Cache>) {
    ptx::ldmatrix_x4(a[0], tile.at(first_row + lane % 16, 2 * number, lane / 16));
  } else {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 8 of the lane's 16 neighbouring elements
      const auto upper = ptx::load_shared_16(tile.at(first_row + g, 8 * number + half, 2 * c));
      const auto lower = ptx::load_shared_16(tile.at(first_row + g + 8, 8 * number + half, 2 * c));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        a[2 * half + i][0] = upper.word[2 * i];
        a[2 * half + i][1] = lower.word[2 * i];
        a[2 * half + i][2] = upper.word[2 * i + 1];
        a[2 * half + i][3] = lower.word[2 * i + 1];
      }
    }
  }
}

// What a lane reads of 16 keys, as two blocks of 8, for the same steps: fragments, or bytes not yet dequantised.
template <class T, class Cache>
struct Keys {
  uint32_t word[2][std::is_same_v<T, Cache> ? 2 : 4];

  // The key fragment of a block for step `step` of kStepsTogether.
  __device__ __forceinline__ void fragment(uint32_t (&b)[2], int block, int step) const {
    if constexpr (std::is_same_v<T, Cache>) {
      b[0] = word[block][0];
      b[1] = word[block][1];
    } else {
      b[0] = dequantise_pair<Cache, 0>(word[block][step]);
      b[1] = dequantise_pair<Cache, 1>(word[block][step]);
    }
  }
};

template <class T, class Cache, int kRows, int kBytes>
__device__ __forceinline__ void load_keys(Keys<T, Cache>& keys, const Tile<kRows, kBytes>& tile, int first_key,
                                          int number, int lane) {
  if constexpr (std::is_same_v<T, Cache>) {
    uint32_t r[4];
    ptx::ldmatrix_x4(r, tile.at(first_key + lane % 8 + lane / 16 * 8, 2 * number, lane / 8 % 2));
    for (int i = 0; i < 4; ++i) keys.word[i / 2][i % 2] = r[i];
  } else {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const auto bytes = ptx::load_shared_16(tile.at(first_key + 8 * block + lane / 4, 4 * number, lane % 4));
      for (int i = 0; i < 4; ++i) keys.word[block][i] = bytes.word[i];
    }
  }
}

// Value fragments of 16 keys for 32 of the head's elements, as four blocks of 8; element_of_block says which.
template <class T, class Cache, int kRows, int kBytes>
__device__ __forceinline__ void load_values(uint32_t (&b)[4][2], const Tile<kRows, kBytes>& tile, int first_key,
                                            int four_blocks, int lane) {
  const int key = first_key + lane % 16;
  if constexpr (std::is_same_v<T, Cache>) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t r[4];
      ptx::ldmatrix_x4_trans(r, tile.at(key, 4 * four_blocks + 2 * i, lane / 16));
      b[2 * i][0] = r[0];
      b[2 * i][1] = r[1];
      b[2 * i + 1][0] = r[2];
      b[2 * i + 1][1] = r[3];
    }
  } else {
    // An 8x8 matrix of 16-bit elements is 8 keys of 16 bytes: a lane gets bytes 2g and 2g + 1 of keys 2c and 2c + 1.
    uint32_t r[4];
    ptx::ldmatrix_x4_trans(r, tile.at(key, 2 * four_blocks, lane / 16));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t by_element = __byte_perm(r[i], 0, 0x3120);
      b[i / 2 * 2][i % 2] = dequantise_pair<Cache, 0>(by_element);
      b[i / 2 * 2 + 1][i % 2] = dequantise_pair<Cache, 1>(by_element);
    }
  }
}

// The head's element that column `column` (2c or 2c + 1) of block `block` of a product with values is.
template <class T, class Cache>
__device__ __forceinline__ int element_of_block(int block, int column) {
  return std::is_same_v<T, Cache> ? 8 * block + column : block / 2 * 16 + 2 * column + block % 2;
}

}  // namespace paged_kv::cuda
