// AMX tiles as kernels see them: the machine's, and ones that any machine can play.
#pragma once

#include <cstring>

#include "../types.h"

namespace inferloop {
namespace {

/// What ldtilecfg reads. Sums (tiles 0 .. 3) are 16 x 16; rows (4, 5) 16 of `row_bytes`; weights (6, 7) their 4 bytes
/// of 16 outputs in each of row_bytes / 4 rows.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  explicit TileConfig(int row_bytes) {
    for (int i = 0; i < 8; ++i) {
      bytes[i] = i == 4 || i == 5 ? row_bytes : 64;
      rows[i] = i >= 6 ? row_bytes / 4 : 16;
    }
  }
};

/// Instructions as text: some compilers' intrinsics take tile numbers only as literals, or believe that a configuration
/// is 8 bytes long.
struct RealTiles {
  explicit RealTiles(int row_bytes) {
    const TileConfig config(row_bytes);
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~RealTiles() { asm volatile("tilerelease"); }

  template <int Tile>
  void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
  }
  template <int Tile>
  void load(const void* from, ptrdiff_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
  }
  template <int Tile>
  void store(void* to, ptrdiff_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
  }
  /// Signed bytes of rows times unsigned ones of weights, added to int32.
  template <int Sum, int X, int W>
  void add_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(X), "i"(W));
  }
  template <int Sum, int X, int W>
  void add_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sum), "i"(X), "i"(W));
  }
};

/// For tests of kernels where there is no AMX.
struct PlayedTiles {
  TileConfig config;
  uint8_t data[8][16][64] = {};

  explicit PlayedTiles(int row_bytes) : config(row_bytes) {}

  template <int Tile>
  void zero() {
    std::memset(data[Tile], 0, sizeof data[Tile]);
  }
  template <int Tile>
  void load(const void* from, ptrdiff_t stride) {
    zero<Tile>();
    for (int r = 0; r < config.rows[Tile]; ++r)
      std::memcpy(data[Tile][r], static_cast<const uint8_t*>(from) + r * stride, config.bytes[Tile]);
  }
  template <int Tile>
  void store(void* to, ptrdiff_t stride) {
    for (int r = 0; r < config.rows[Tile]; ++r)
      std::memcpy(static_cast<uint8_t*>(to) + r * stride, data[Tile][r], config.bytes[Tile]);
  }
  template <int Sum, int X, int W>
  void add_bytes() {
    add<int32_t, Sum>([&](int r, int i, int c) {
      int32_t dot = 0;
      for (int b = 4 * i; b < 4 * i + 4; ++b)
        dot += static_cast<int8_t>(data[X][r][b]) * data[W][i][4 * c + b % 4];
      return dot;
    });
  }
  template <int Sum, int X, int W>
  void add_bf16() {
    add<float, Sum>([&](int r, int i, int c) {
      return bf16_at(data[X][r] + 4 * i) * bf16_at(data[W][i] + 4 * c) +
             bf16_at(data[X][r] + 4 * i + 2) * bf16_at(data[W][i] + 4 * c + 2);
    });
  }

 private:
  static float bf16_at(const uint8_t* at) {
    uint32_t bits = static_cast<uint32_t>(at[0]) << 16 | static_cast<uint32_t>(at[1]) << 24;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  template <class Number, int Sum, class Dot>
  void add(Dot&& dot) {
    for (int r = 0; r < 16; ++r)
      for (int c = 0; c < 16; ++c) {
        Number sum;
        std::memcpy(&sum, data[Sum][r] + 4 * c, sizeof sum);
        for (int i = 0; i < config.bytes[4] / 4; ++i) sum += dot(r, i, c);
        std::memcpy(data[Sum][r] + 4 * c, &sum, sizeof sum);
      }
  }
};

}  // namespace
}  // namespace inferloop
