#include <immintrin.h>

#include "levels.h"

namespace inferloop {
namespace {

uint64_t read(const uint8_t* begin, size_t num_bytes) {
  __m512i seen[8];
  for (__m512i& each : seen) each = _mm512_setzero_si512();
  for (size_t i = 0; i < num_bytes; i += sizeof seen)
    for (int j = 0; j < 8; ++j)
      seen[j] = _mm512_or_si512(seen[j], _mm512_load_si512(reinterpret_cast<const __m512i*>(begin + i) + j));
  alignas(64) uint64_t last[8], all = 0;
  for (int j = 1; j < 8; ++j) seen[0] = _mm512_or_si512(seen[0], seen[j]);
  _mm512_store_si512(last, seen[0]);
  for (uint64_t each : last) all |= each;
  return all;
}

constexpr int kChains = 16;

// The loops are written out: a compiler would keep sums in memory, or see that nobody wants them.

void int8(int64_t num_rounds) {
  const __m512i x = _mm512_set1_epi8(1);
  asm volatile(
      ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\t"
      "vpxord %%zmm\\sum, %%zmm\\sum, %%zmm\\sum\n\t"
      ".endr\n"
      "1:\n\t"
      ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\t"
      "vpdpbusd %1, %1, %%zmm\\sum\n\t"
      ".endr\n\t"
      "dec %0\n\t"
      "jnz 1b"
      : "+r"(num_rounds)
      : "v"(x)
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
        "xmm13", "xmm14", "xmm15");
}

void fp32(int64_t num_rounds) {
  const __m512 x = _mm512_set1_ps(1.0f);
  asm volatile(
      ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\t"
      "vpxord %%zmm\\sum, %%zmm\\sum, %%zmm\\sum\n\t"
      ".endr\n"
      "1:\n\t"
      ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\t"
      "vfmadd231ps %1, %1, %%zmm\\sum\n\t"
      ".endr\n\t"
      "dec %0\n\t"
      "jnz 1b"
      : "+r"(num_rounds)
      : "v"(x)
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
        "xmm13", "xmm14", "xmm15");
}

}  // namespace

const HardwareKernels& hardware_avx512() {
  static constexpr HardwareKernels kernels = {read, {int8, 2.0 * 64 * kChains}, {}, {fp32, 2.0 * 16 * kChains}};
  return kernels;
}

}  // namespace inferloop
