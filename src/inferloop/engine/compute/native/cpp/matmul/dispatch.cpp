#include "levels.h"

namespace inferloop {

const MatmulKernels& matmul_kernels([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::amx) {
    static const bool works = agree(amx_matmul(), avx512_bf16_matmul());
    if (works) return amx_matmul();
  }
  if (isa >= Isa::avx512_bf16) return avx512_bf16_matmul();
  if (isa == Isa::avx512) return avx512_matmul();
  if (isa == Isa::avx2) return avx2_matmul();
#endif
  return scalar_matmul();
}

}  // namespace inferloop
