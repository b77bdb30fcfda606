// What happens to rows between products: norms, forms, the gated unit, rotary embedding.
#pragma once

#include "../adapter.h"
#include "../isa.h"
#include "../types.h"

namespace inferloop {

enum class Activation : uint8_t { silu, gelu_tanh };

/// All levels give the same bits. Lengths are multiples of 16, but for `rotate` and `add`, which take any.
struct RowKernels {
  /// Columns begin .. begin + count of row r of `to` take x[0 .. count) in its form; begin, count: multiples of 32.
  void (*encode)(const float* x, int begin, int count, const Rows& to, int r);

  /// RMSNorm (Zhang, Sennrich 2019): out[i] = x[i] / sqrt(mean(x^2) + eps) * gain[i]; out may be x.
  void (*norm)(const float* x, const float* gain, float eps, int k, float* out);

  /// out[i] = act(gate[i]) * up[i] (Shazeer 2020), act within 4 ulp; out may be gate.
  void (*gated)(Activation act, const float* gate, const float* up, int n, float* out);

  /// Rotate pairs (i, i + dim / 2) of a head in place, i < dim / 2, by cos[i], sin[i] (Su et al. 2021). What lies
  /// beyond dim stays.
  void (*rotate)(float* head, const float* cos, const float* sin, int dim);

  /// x[i] = cap * tanh(x[i] / cap), within 2^-22 * cap.
  void (*soften)(float* x, float cap, int n);

  /// x[i] += y[i].
  void (*add)(float* x, const float* y, int n);

  /// x[i] += y[i] * scale.
  void (*add_scaled)(float* x, const float* y, float scale, int n);

  /// x[i] = e^x[i] / sum(e^x), which -infinity takes no part in.
  void (*softmax)(float* x, int n);

  /// Add to `count` rows of `out`, which has these tiles, what `update.b` makes of rows of x, `update.width()` apart.
  void (*expand)(const LowRank& update, const float* x, int count, int tile_begin, int tile_end, float* out, size_t ld);
};

const RowKernels& row_kernels(Isa isa);

}  // namespace inferloop
