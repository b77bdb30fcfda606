#include "levels.h"

namespace inferloop {

const RowKernels& row_kernels([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  if (isa >= Isa::avx512) return avx512_rows();
  if (isa == Isa::avx2) return avx2_rows();
#endif
  return scalar_rows();
}

}  // namespace inferloop
