// How a product is cut into blocks of a few rows and tiles. For the levels with vectors; each includes its own copy.
#pragma once

#include "../types.h"

namespace inferloop {
namespace {

template <int N>
struct Count {
  static constexpr int value = N;
};

/// Call body(Count<N>) for the n in 1 .. Max that is given.
template <int Max, class Body>
[[gnu::always_inline]] inline void with_count(int n, Body&& body) {
  if constexpr (Max > 1) {
    if (n < Max) return with_count<Max - 1>(n, body);
  }
  body(Count<Max>{});
}

/// Cut m rows into the fewest blocks of at most Max, nearly equal ones, and call body(first row, Count<rows>).
template <int Max, class Body>
[[gnu::always_inline]] inline void each_block(int m, Body&& body) {
  const int num_blocks = (m + Max - 1) / Max;
  for (int b = 0, row = 0; b < num_blocks; ++b) {
    const int rows = (m - row + num_blocks - b - 1) / (num_blocks - b);
    with_count<Max>(rows, [&](auto count) { body(row, count); });
    row += rows;
  }
}

/// Rows that pass by tiles together, and how many inputs of them: what stays in the L2 cache meanwhile. Where that is
/// not all inputs of enough rows, sums wait in the output for the next inputs, in the same order. For each chunk of
/// rows the weights come again.
struct Chunks {
  int rows;
  ptrdiff_t depth;  // inputs

  Chunks(ptrdiff_t m, ptrdiff_t k, ptrdiff_t input_bytes, ptrdiff_t max_block) {
    constexpr ptrdiff_t kBytes = 256 << 10, kEnough = 96;
    const ptrdiff_t fitting = kBytes / (k * input_bytes) / max_block * max_block;
    const ptrdiff_t most = fitting > kEnough ? fitting : kEnough;
    rows = static_cast<int>(m < 1 ? 1 : m < most ? m : most);  // none pass at all then, and what divides is no 0
    const ptrdiff_t deep = kBytes / (rows * input_bytes) / kGroup * kGroup;
    depth = deep < k ? deep : k;
  }
};

/// Add the bias of a range of tiles to its outputs.
void add_bias(const Matrix& w, int m, int tile_begin, int tile_end, float* out, size_t ld_out) {
  const int first = tile_begin * kTile;
  const int count = (tile_end * kTile < w.n ? tile_end * kTile : w.n) - first;
  for (int r = 0; r < m; ++r)
    for (int c = 0; c < count; ++c) out[r * ld_out + c] += w.bias[first + c];
}

}  // namespace
}  // namespace inferloop
