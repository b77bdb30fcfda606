#include <immintrin.h>

#include "levels.h"

namespace inferloop {
namespace {

uint64_t read(const uint8_t* begin, size_t num_bytes) {
  __m256i seen[8];
  for (__m256i& each : seen) each = _mm256_setzero_si256();
  for (size_t i = 0; i < num_bytes; i += sizeof seen)
    for (int j = 0; j < 8; ++j)
      seen[j] = _mm256_or_si256(seen[j], _mm256_load_si256(reinterpret_cast<const __m256i*>(begin + i) + j));
  alignas(32) uint64_t last[4];
  for (int j = 1; j < 8; ++j) seen[0] = _mm256_or_si256(seen[0], seen[j]);
  _mm256_store_si256(reinterpret_cast<__m256i*>(last), seen[0]);
  return last[0] | last[1] | last[2] | last[3];
}

// The loops are written out: a compiler would keep sums in memory, or see that nobody wants them.

constexpr int kInt8Chains = 6;

/// Without a dot product of its own the level needs three instructions: bytes to pairs, pairs to fours, add.
void int8(int64_t num_rounds) {
  const __m256i bytes = _mm256_set1_epi8(1), ones = _mm256_set1_epi16(1);
  asm volatile(
      ".irp sum,0,1,2,3,4,5\n\t"
      "vpxor %%ymm\\sum, %%ymm\\sum, %%ymm\\sum\n\t"
      ".endr\n"
      "1:\n\t"
      ".irp sum,0,1,2,3,4,5\n\t"
      "vpmaddubsw %1, %1, %%ymm6\n\t"
      "vpmaddwd %2, %%ymm6, %%ymm6\n\t"
      "vpaddd %%ymm6, %%ymm\\sum, %%ymm\\sum\n\t"
      ".endr\n\t"
      "dec %0\n\t"
      "jnz 1b"
      : "+r"(num_rounds)
      : "x"(bytes), "x"(ones)
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6");
}

constexpr int kFp32Chains = 12;

void fp32(int64_t num_rounds) {
  const __m256 x = _mm256_set1_ps(1.0f);
  asm volatile(
      ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11\n\t"
      "vxorps %%ymm\\sum, %%ymm\\sum, %%ymm\\sum\n\t"
      ".endr\n"
      "1:\n\t"
      ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11\n\t"
      "vfmadd231ps %1, %1, %%ymm\\sum\n\t"
      ".endr\n\t"
      "dec %0\n\t"
      "jnz 1b"
      : "+r"(num_rounds)
      : "x"(x)
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11");
}

}  // namespace

const HardwareKernels& hardware_avx2() {
  static constexpr HardwareKernels kernels = {
      read, {int8, 2.0 * 32 * kInt8Chains}, {}, {fp32, 2.0 * 8 * kFp32Chains}};
  return kernels;
}

}  // namespace inferloop
