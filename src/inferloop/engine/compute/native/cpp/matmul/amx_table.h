// Products on AMX tiles, for machines that have them and, with tiles that are played, for tests.
//
// Group formats keep the bits of the other levels: a tile instruction sums the 32 inputs of a record (or 16) exactly
// for 16 rows at once, and what it is worth is computed as everywhere. So rows that do not fill 16 may go the other
// way. bf16 goes through tiles at every number of rows, since their order of operations is their own.
#pragma once

#include "avx512_float.h"
#include "avx512_group.h"
#include "levels.h"
#include "tiles.h"

namespace inferloop {
namespace {

constexpr int kTileRows = 16;

/// One tile of weights times 16 rows at `row`; its codes, a byte each, lie [32][16] records that are code_stride apart.
template <class Tiles, int Parts, bool HasMin>
[[gnu::noinline]] void tile_block(Tiles& tiles, const RecordShape& record, const uint8_t* weights, const uint8_t* codes,
                                  ptrdiff_t code_stride, const GroupRows& x, ptrdiff_t row, float* out, size_t ld_out) {
  const ptrdiff_t n = x.num_records, numbers = record.wide ? 64 : 32;
  alignas(64) int32_t dots[2][Parts][kTileRows][kTile];  // of the record that is computed, and of the one before
  const auto multiply_codes = [&](ptrdiff_t g) {
    const int8_t* rows = x.codes + (row * n + g) * kGroup;
    tiles.template zero<0>();
    tiles.template load<4>(rows, n * kGroup);
    tiles.template load<6>(codes + g * code_stride, 64);
    tiles.template add_bytes<0, 4, 6>();
    tiles.template store<0>(dots[g % 2][0], 64);
    if constexpr (Parts == 2) {
      tiles.template zero<1>();
      tiles.template load<5>(rows + 16, n * kGroup);
      tiles.template load<7>(codes + g * code_stride + 256, 64);
      tiles.template add_bytes<1, 5, 7>();
      tiles.template store<1>(dots[g % 2][1], 64);
    }
  };
  __m512 sums[kTileRows];
  for (int r = 0; r < kTileRows; ++r) sums[r] = _mm512_setzero_ps();
  multiply_codes(0);
  for (ptrdiff_t g = 0; g < n; ++g) {
    if (g + 1 < n) multiply_codes(g + 1);
    const uint8_t* at = weights + g * record.size;
    __m512 scales[Parts], mins[Parts];
    for (int p = 0; p < Parts; ++p) {
      scales[p] = numbers_at(at + record.scales + p * numbers, record.wide);
      if (HasMin) mins[p] = numbers_at(at + record.mins + p * numbers, record.wide);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kTileRows; ++r) {
      const ptrdiff_t i = (row + r) * n + g;
      __m512 worth = _mm512_setzero_ps();
      for (int p = 0; p < Parts; ++p) {
        const __m512i dot = _mm512_add_epi32(_mm512_load_si512(dots[g % 2][p][r]),
                                             _mm512_set1_epi32(x.starts[i * Parts + p]));
        const __m512 steps = _mm512_maskz_cvtepi32_ps(0xffff, dot);
        worth = p == 0 ? _mm512_mul_ps(steps, scales[p]) : _mm512_fmadd_ps(steps, scales[p], worth);
      }
      if (HasMin)
        for (int p = 0; p < Parts; ++p) worth = _mm512_fmadd_ps(_mm512_set1_ps(x.sums[i * Parts + p]), mins[p], worth);
      sums[r] = _mm512_fmadd_ps(worth, _mm512_set1_ps(x.scales[i]), sums[r]);
    }
  }
  for (int r = 0; r < kTileRows; ++r) _mm512_storeu_ps(out + r * ld_out, sums[r]);
}

/// The codes of a tile as bytes.
void unpack_codes(const RecordShape& record, const uint8_t* tile, ptrdiff_t num_records, uint8_t* to) {
  const __m512i low = _mm512_set1_epi8(15);
  for (ptrdiff_t g = 0; g < num_records; ++g, tile += record.size, to += kGroup * kTile)
    for (int j = 0; j < 4; ++j) {
      const __m512i pairs = _mm512_loadu_si512(tile + 64 * j);
      _mm512_storeu_si512(to + 64 * j, _mm512_and_si512(pairs, low));
      _mm512_storeu_si512(to + 64 * (j + 4), _mm512_and_si512(_mm512_srli_epi16(pairs, 4), low));
    }
}

template <class Tiles>
struct TileGroupKernels {
  template <int Bits, int Parts, bool HasMin>
  static void tiles(const Matrix& w, const GroupRows& x, int tile_begin, int tile_end, float* out, size_t ld_out) {
    const RecordShape record(w);
    const ptrdiff_t n = x.num_records, full = x.m / kTileRows * kTileRows;
    if (full > 0) {
      Tiles tiles(kGroup / Parts);
      for (int t = tile_begin; t < tile_end; ++t) {
        const uint8_t* weights = w.data + t * w.tile_bytes;
        if (Bits == 4) unpack_codes(record, weights, n, x.spare);
        for (ptrdiff_t row = 0; row < full; row += kTileRows)
          tile_block<Tiles, Parts, HasMin>(tiles, record, weights, Bits == 4 ? x.spare : weights,
                                           Bits == 4 ? kGroup * kTile : record.size, x, row,
                                           out + row * ld_out + (t - tile_begin) * kTile, ld_out);
      }
    }
    if (full == x.m) return;
    const GroupRows rest = {static_cast<int>(x.m - full), n, x.codes + full * n * kGroup, x.scales + full * n,
                            x.starts + full * n * Parts,  x.sums + full * n * Parts, x.spare};
    GroupKernels::tiles<Bits, Parts, HasMin>(w, rest, tile_begin, tile_end, out + full * ld_out, ld_out);
  }
};

/// Up to 32 rows times up to 2 tiles of weights.
template <class Tiles>
void tile_bf16(Tiles& tiles, const uint8_t* const weights[2], const Bf16* const rows[2], ptrdiff_t k,
               float* const out[2], const size_t ld_out[2]) {
  const ptrdiff_t stride = k * sizeof(Bf16);
  tiles.template zero<0>();
  tiles.template zero<1>();
  tiles.template zero<2>();
  tiles.template zero<3>();
  for (ptrdiff_t i = 0; i < k; i += 32) {
    tiles.template load<4>(rows[0] + i, stride);
    tiles.template load<6>(weights[0] + i * kTile * sizeof(Bf16), 64);
    tiles.template add_bf16<0, 4, 6>();
    if (weights[1]) {
      tiles.template load<7>(weights[1] + i * kTile * sizeof(Bf16), 64);
      tiles.template add_bf16<1, 4, 7>();
    }
    if (!rows[1]) continue;
    tiles.template load<5>(rows[1] + i, stride);
    tiles.template add_bf16<2, 5, 6>();
    if (weights[1]) tiles.template add_bf16<3, 5, 7>();
  }
  tiles.template store<0>(out[0], ld_out[0] * sizeof(float));
  if (weights[1]) tiles.template store<1>(out[0] + kTile, ld_out[0] * sizeof(float));
  if (!rows[1]) return;
  tiles.template store<2>(out[1], ld_out[1] * sizeof(float));
  if (weights[1]) tiles.template store<3>(out[1] + kTile, ld_out[1] * sizeof(float));
}

size_t bf16_scratch_bytes(const Matrix& w) { return kTileRows * (w.k * sizeof(Bf16) + 2 * kTile * sizeof(float)); }

/// The rows that do not fill 16 are copied to scratch and filled up there; what becomes of them is copied back.
template <class Tiles>
void tile_bf16_multiply(const Matrix& w, const Rows& x, int tile_begin, int tile_end, float* out, size_t ld_out,
                        uint8_t* scratch) {
  if (x.m == 0) return;
  const ptrdiff_t k = w.k, full = x.m / kTileRows * kTileRows, rest = x.m - full;
  Bf16* padded = reinterpret_cast<Bf16*>(scratch);
  float* padded_out = reinterpret_cast<float*>(scratch + kTileRows * k * sizeof(Bf16));
  std::memcpy(padded, x.bf16 + full * k, rest * k * sizeof(Bf16));
  std::memset(padded + rest * k, 0, (kTileRows - rest) * k * sizeof(Bf16));
  Tiles tiles(64);
  for (int t = tile_begin; t < tile_end; t += 2, out += 2 * kTile) {
    const uint8_t* tile = w.data + t * w.tile_bytes;
    const uint8_t* const weights[2] = {tile, t + 1 < tile_end ? tile + w.tile_bytes : nullptr};
    for (ptrdiff_t row = 0; row < x.m; row += 2 * kTileRows) {
      const Bf16* rows[2] = {};
      float* to[2] = {};
      size_t ld[2] = {};
      for (int i = 0; i < 2 && row + i * kTileRows < x.m; ++i) {
        const ptrdiff_t first = row + i * kTileRows;
        rows[i] = first < full ? x.bf16 + first * k : padded;
        to[i] = first < full ? out + first * ld_out : padded_out;
        ld[i] = first < full ? ld_out : 2 * kTile;
      }
      tile_bf16(tiles, weights, rows, k, to, ld);
    }
    for (ptrdiff_t r = 0; r < rest; ++r)
      std::memcpy(out + (full + r) * ld_out, padded_out + r * 2 * kTile, (weights[1] ? 2 : 1) * kTile * sizeof(float));
  }
}

template <class Tiles>
void tile_multiply(const Matrix& w, const Rows& x, int tile_begin, int tile_end, float* out, size_t ld_out,
                   uint8_t* scratch) {
  if (w.format == Format::group)
    group_multiply<TileGroupKernels<Tiles>>(w, x, tile_begin, tile_end, out, ld_out, scratch);
  if (w.format == Format::bf16) tile_bf16_multiply<Tiles>(w, x, tile_begin, tile_end, out, ld_out, scratch);
  if (w.format == Format::f32) float_multiply<F32>(w, x, tile_begin, tile_end, out, ld_out);
  if (w.bias) add_bias(w, x.m, tile_begin, tile_end, out, ld_out);
}

size_t tile_scratch_bytes(const Matrix& w, int m) {
  if (w.format == Format::group) return group_scratch_bytes(w, m, static_cast<size_t>(w.k) * kTile);
  return w.format == Format::bf16 ? bf16_scratch_bytes(w) : 0;
}

}  // namespace
}  // namespace inferloop
