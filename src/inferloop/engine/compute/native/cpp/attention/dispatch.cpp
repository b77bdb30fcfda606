#include "levels.h"

namespace inferloop {

const AttentionKernels& attention_kernels([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512_bf16) return avx512_bf16_attention_kernels();
  if (isa == Isa::avx512) return avx512_attention_kernels();
  if (isa == Isa::avx2) return avx2_attention_kernels();
#endif
  return scalar_attention_kernels();
}

}  // namespace inferloop
