// The tables of the levels, each in a file of its own.
#pragma once

#include "matmul.h"

namespace inferloop {

const MatmulKernels& scalar_matmul();
const MatmulKernels& avx2_matmul();
const MatmulKernels& avx512_matmul();
const MatmulKernels& avx512_bf16_matmul();

}  // namespace inferloop
