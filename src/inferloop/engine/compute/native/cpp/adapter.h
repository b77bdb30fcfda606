// Low-rank adapters: what is added to the products of some rows.
#pragma once

#include <vector>

#include "types.h"

namespace inferloop {

/// Adds b . (a . x) to what a product makes of x. `a`: rank outputs, the product's inputs, in a format that takes the
/// product's form of rows; `b`: the product's outputs in its order, rank inputs, f32. The rank is a multiple of 32, filled
/// up with zeros. No data: this product stays as it is.
struct LowRank {
  Matrix a;
  Matrix b;

  bool is_there() const { return a.data != nullptr; }
  int rank() const { return b.k; }
};

struct AdaptedLayer {
  LowRank qkv;
  LowRank out;
  LowRank gate_up;
  LowRank down;
};

struct Adapter {
  std::vector<AdaptedLayer> layers;
  int max_rank = 0;
};

/// Rows begin .. begin + count of the residual stream, which go through one adapter.
struct AdaptedRows {
  const Adapter* adapter = nullptr;
  int begin = 0;
  int count = 0;
};

}  // namespace inferloop
