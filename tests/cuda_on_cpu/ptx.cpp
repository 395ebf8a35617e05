// The warp-wide instructions: what the 32 lanes bring, as whole matrices.
#include <arch/ptx.cuh>
#include <bit>

namespace paged_kv::ptx::detail {
namespace {

using cuda_on_cpu::kWarpSize;

float from_bfloat16(uint32_t bits) { return std::bit_cast<float>(bits << 16); }

// Exact, subnormals, infinities and NaN included: a float16 with its exponent moved into a float32's place is too small
// by 2^112, which a multiplication mends; the top exponent then stands for infinity and NaN.
float from_float16(uint32_t bits) {
  const float magnitude = std::bit_cast<float>((bits & 0x7fff) << 13) * 0x1p112f;
  const uint32_t special = (bits & 0x7c00) == 0x7c00 ? 0x7f800000u : 0;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | special | (bits & 0x8000) << 16);
}

// Sums in float32, k ascending; a tensor core's own order and rounding of its partial sums are not specified.
template <float (*kToFloat)(uint32_t)>
void mma(void* const* lanes) {
  float a[16][16], b[16][8], d[16][8];
  auto operands = [&](int lane) -> const MmaOperands& { return *static_cast<const MmaOperands*>(lanes[lane]); };
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, c = lane % 4 * 2;
    const MmaOperands& o = operands(lane);
    for (int i = 0; i < 2; ++i) {
      const int shift = 16 * i;
      a[g][c + i] = kToFloat(o.a[0] >> shift & 0xffff);
      a[g + 8][c + i] = kToFloat(o.a[1] >> shift & 0xffff);
      a[g][c + 8 + i] = kToFloat(o.a[2] >> shift & 0xffff);
      a[g + 8][c + 8 + i] = kToFloat(o.a[3] >> shift & 0xffff);
      b[c + i][g] = kToFloat(o.b[0] >> shift & 0xffff);
      b[c + 8 + i][g] = kToFloat(o.b[1] >> shift & 0xffff);
      d[g][c + i] = o.d[i];
      d[g + 8][c + i] = o.d[2 + i];
    }
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, c = lane % 4 * 2;
    for (int i = 0; i < 2; ++i) {
      operands(lane).d[i] = d[g][c + i];
      operands(lane).d[2 + i] = d[g + 8][c + i];
    }
  }
}

// element(matrix, row, column) of the four matrices whose rows the lanes point at
template <bool kTransposed>
void load_matrices(void* const* lanes) {
  auto operands = [&](int lane) -> const LdmatrixOperands& {
    return *static_cast<const LdmatrixOperands*>(lanes[lane]);
  };
  auto element = [&](int matrix, int row, int column) {
    uint16_t bits;
    std::memcpy(&bits, static_cast<const char*>(operands(8 * matrix + row).row) + 2 * column, 2);
    return uint32_t{bits};
  };
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const int g = lane / 4, c = lane % 4 * 2;
    for (int matrix = 0; matrix < 4; ++matrix) {
      operands(lane).r[matrix] = kTransposed ? element(matrix, c, g) | element(matrix, c + 1, g) << 16
                                             : element(matrix, g, c) | element(matrix, g, c + 1) << 16;
    }
  }
}

}  // namespace

void mma_bfloat16(void* const* lanes) { mma<from_bfloat16>(lanes); }
void mma_float16(void* const* lanes) { mma<from_float16>(lanes); }
void ldmatrix(void* const* lanes) { load_matrices<false>(lanes); }
void ldmatrix_trans(void* const* lanes) { load_matrices<true>(lanes); }

}  // namespace paged_kv::ptx::detail
