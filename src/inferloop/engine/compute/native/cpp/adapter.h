// Low-rank adapters: what is added to the products of some rows.
#pragma once

#include <vector>

#include "types.h"

namespace inferloop {

/// Adds b . (a . x) to what a product makes of x. `a`: the product's inputs, in a format that takes its form of rows;
/// `b`: the product's outputs in its order, f32 or bf16. Where several matrices make up a product, each has outputs of `a`
/// of its own: tile t of b takes b.k of them, an even number, from columns[t] on, below 0 none. No data: this product
/// stays as it is.
struct LowRank {
  Matrix a;
  Matrix b;
  const int32_t* columns = nullptr;  // [b.num_tiles()]

  bool is_there() const { return a.data != nullptr; }
  int width() const { return a.num_tiles() * kTile; }
};

struct AdaptedLayer {
  LowRank qkv;
  LowRank out;
  LowRank gate_up;
  LowRank down;
};

struct Adapter {
  std::vector<AdaptedLayer> layers;
  int max_width = 0;
};

/// Rows begin .. begin + count of the residual stream, which go through one adapter.
struct AdaptedRows {
  const Adapter* adapter = nullptr;
  int begin = 0;
  int count = 0;
};

}  // namespace inferloop
