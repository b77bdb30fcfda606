#include <immintrin.h>

#include "levels.h"

namespace inferloop {
namespace {

constexpr int kChains = 16;

// The loop is written out: a compiler would keep sums in memory, or see that nobody wants them.

void bf16(int64_t num_rounds) {
  const __m512i x = _mm512_set1_epi16(0x3f80);
  asm volatile(
      ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\t"
      "vpxord %%zmm\\sum, %%zmm\\sum, %%zmm\\sum\n\t"
      ".endr\n"
      "1:\n\t"
      ".irp sum,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15\n\t"
      "vdpbf16ps %1, %1, %%zmm\\sum\n\t"
      ".endr\n\t"
      "dec %0\n\t"
      "jnz 1b"
      : "+r"(num_rounds)
      : "v"(x)
      : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12",
        "xmm13", "xmm14", "xmm15");
}

}  // namespace

const HardwareKernels& hardware_avx512_bf16() {
  static constexpr HardwareKernels kernels = {nullptr, {}, {bf16, 2.0 * 32 * kChains}, {}};
  return kernels;
}

}  // namespace inferloop
