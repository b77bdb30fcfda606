#if defined(__x86_64__)
#include "avx512_table.h"

namespace inferloop {

const MatmulKernels& avx512_bf16_matmul() {
  static const MatmulKernels kernels = {multiply, scratch_bytes, scalar_matmul().row};
  return kernels;
}

}  // namespace inferloop
#endif
