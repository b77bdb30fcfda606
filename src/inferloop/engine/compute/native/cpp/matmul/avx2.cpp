// fp32 and bf16 weights on 256-bit registers with FMA, and the table of the level.
#if defined(__x86_64__)
#include "avx2_group.h"
#include "levels.h"

namespace inferloop {
namespace {

/// R rows times a tile; every output is one chain over the inputs in order.
template <int R>
[[gnu::noinline]] void f32_block(const uint8_t* tile, const float* x, ptrdiff_t k, float* out, size_t ld_out) {
  const float* weights = reinterpret_cast<const float*>(tile);
  __m256 sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
  for (ptrdiff_t i = 0; i < k; ++i) {
    const __m256 first = _mm256_load_ps(weights + i * kTile), second = _mm256_load_ps(weights + i * kTile + 8);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m256 value = _mm256_set1_ps(x[r * k + i]);
      sums[r][0] = _mm256_fmadd_ps(first, value, sums[r][0]);
      sums[r][1] = _mm256_fmadd_ps(second, value, sums[r][1]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(out + r * ld_out + 8 * half, sums[r][half]);
}

/// The lower bf16 of each pair, and the upper one.
[[gnu::always_inline]] inline __m256 lower_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
}
[[gnu::always_inline]] inline __m256 upper_of(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

template <int R>
[[gnu::noinline]] void bf16_block(const uint8_t* tile, const Bf16* x, ptrdiff_t k, float* out, size_t ld_out) {
  __m256 sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
  for (ptrdiff_t i = 0; i < k; i += 2) {
    const __m256i* pairs = reinterpret_cast<const __m256i*>(tile + i * kTile * sizeof(Bf16));
    const __m256i w[2] = {_mm256_load_si256(pairs), _mm256_load_si256(pairs + 1)};
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * k + i, sizeof pair);
      const __m256i value = _mm256_set1_epi32(pair);
      for (int half = 0; half < 2; ++half) {
        sums[r][half] = _mm256_fmadd_ps(lower_of(w[half]), lower_of(value), sums[r][half]);
        sums[r][half] = _mm256_fmadd_ps(upper_of(w[half]), upper_of(value), sums[r][half]);
      }
    }
  }
  for (int r = 0; r < R; ++r)
    for (int half = 0; half < 2; ++half) _mm256_storeu_ps(out + r * ld_out + 8 * half, sums[r][half]);
}

void float_multiply(const Matrix& w, const Rows& x, int tile_begin, int tile_end, float* out, size_t ld_out) {
  const ptrdiff_t k = w.k;
  for (int t = tile_begin; t < tile_end; ++t, out += kTile) {
    const uint8_t* tile = w.data + t * w.tile_bytes;
    if (w.format == Format::f32)
      each_block<6>(x.m, [&](int row, auto rows) {
        f32_block<decltype(rows)::value>(tile, x.f32 + row * k, k, out + row * ld_out, ld_out);
      });
    else
      each_block<4>(x.m, [&](int row, auto rows) {
        bf16_block<decltype(rows)::value>(tile, x.bf16 + row * k, k, out + row * ld_out, ld_out);
      });
  }
}

void multiply(const Matrix& w, const Rows& x, int tile_begin, int tile_end, float* out, size_t ld_out,
              uint8_t* scratch) {
  if (w.format == Format::group)
    group_multiply<GroupKernels>(w, x, tile_begin, tile_end, out, ld_out, scratch);
  else
    float_multiply(w, x, tile_begin, tile_end, out, ld_out);
  if (w.bias) add_bias(w, x.m, tile_begin, tile_end, out, ld_out);
}

size_t scratch_bytes(const Matrix& w, int m) { return w.format == Format::group ? group_scratch_bytes(w, m) : 0; }

}  // namespace

const MatmulKernels& avx2_matmul() {
  static const MatmulKernels kernels = {multiply, scratch_bytes, scalar_matmul().row};
  return kernels;
}

}  // namespace inferloop
#endif
