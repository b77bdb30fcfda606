// Weights times rows.
#pragma once

#include "../isa.h"
#include "../types.h"

namespace inferloop {

struct MatmulKernels {
  /// out[r * ld_out + c] = x[r] . w[16 * tile_begin + c] + bias for every row r and c < 16 * (tile_end - tile_begin).
  /// x.form is form_of(w.format). Outputs beyond w.n are zero.
  ///
  /// An output depends on its row and its weights alone: it is summed in one order whatever the number of rows or the
  /// range of tiles is, so batch mates and the way a prompt is cut do not show. For group formats that order is: within
  /// a record (or each half of one, when group is 16) exact in integers; across records
  ///     sum = fma(float(dot), scale_w, ...) as written in matmul/scalar.cpp
  /// and every level repeats it bit for bit. For f32 and bf16 the order is a level's own.
  ///
  /// `scratch` is this thread's, `scratch_bytes(w, m)` long, 64-byte aligned. Reads x, w; writes out and scratch alone.
  void (*multiply)(const Matrix& w, const Rows& x, int tile_begin, int tile_end, float* out, size_t ld_out,
                   uint8_t* scratch);

  /// For a matrix of this kind and up to m rows.
  size_t (*scratch_bytes)(const Matrix& w, int m);

  /// Weights of one output as fp32, out[k]: how an embedding is looked up.
  void (*row)(const Matrix& w, int output, float* out);
};

/// The kernels of a level that this machine has.
const MatmulKernels& matmul_kernels(Isa isa);

}  // namespace inferloop
