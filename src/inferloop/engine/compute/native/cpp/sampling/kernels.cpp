#include "levels.h"

namespace inferloop {

const SamplingKernels& sampling_kernels([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return avx512_sampling();
  if (isa >= Isa::avx2) return avx2_sampling();
#endif
  return scalar_sampling();
}

}  // namespace inferloop
