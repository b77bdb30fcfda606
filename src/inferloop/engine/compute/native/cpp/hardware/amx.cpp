#include <immintrin.h>

#include "levels.h"

namespace inferloop {
namespace {

constexpr int kRows = 16, kRowBytes = 64, kTiles = 8, kSums = 4;

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

/// Four tiles of sums (0 .. 3), two of rows (4, 5), two of weights (6, 7): every sum is a chain of its own.
struct Tiles {
  Tiles() {
    TileConfig config;
    for (int i = 0; i < kTiles; ++i) {
      config.row_bytes[i] = kRowBytes;
      config.rows[i] = kRows;
    }
    asm volatile("" : : "r"(&config) : "memory");  // some compilers think that loading it reads 8 bytes alone
    _tile_loadconfig(&config);  // and all tiles are zero
  }
  ~Tiles() { _tile_release(); }
};

void int8(int64_t num_rounds) {
  Tiles tiles;
  for (int64_t i = 0; i < num_rounds; ++i) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
}

void bf16(int64_t num_rounds) {
  Tiles tiles;
  for (int64_t i = 0; i < num_rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

constexpr double kOutputs = 1.0 * kRows * kRows * kSums;

}  // namespace

const HardwareKernels& hardware_amx() {
  static constexpr HardwareKernels kernels = {nullptr, {int8, 2 * 64 * kOutputs}, {bf16, 2 * 32 * kOutputs}, {}};
  return kernels;
}

}  // namespace inferloop
