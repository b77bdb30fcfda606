#include "levels.h"

namespace inferloop {

const MatmulKernels& matmul_kernels(Isa) { return scalar_matmul(); }

}  // namespace inferloop
