// The kernels of the levels from avx512 on, compiled for each.
#pragma once

#include "avx512_float.h"
#include "avx512_group.h"
#include "levels.h"

namespace inferloop {
namespace {

void multiply(const Matrix& w, const Rows& x, int tile_begin, int tile_end, float* out, size_t ld_out,
              uint8_t* scratch) {
  if (w.format == Format::group) group_multiply<GroupKernels>(w, x, tile_begin, tile_end, out, ld_out, scratch);
  if (w.format == Format::bf16) float_multiply<Bf16Pairs>(w, x, tile_begin, tile_end, out, ld_out);
  if (w.format == Format::f32) float_multiply<F32>(w, x, tile_begin, tile_end, out, ld_out);
  if (w.bias) add_bias(w, x.m, tile_begin, tile_end, out, ld_out);
}

size_t scratch_bytes(const Matrix& w, int m) { return w.format == Format::group ? group_scratch_bytes(w, m) : 0; }

}  // namespace
}  // namespace inferloop
