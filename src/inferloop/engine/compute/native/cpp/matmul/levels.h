// The tables of the levels, each in a file of its own.
#pragma once

#include "matmul.h"

namespace inferloop {

const MatmulKernels& scalar_matmul();
const MatmulKernels& avx2_matmul();
const MatmulKernels& avx512_matmul();
const MatmulKernels& avx512_bf16_matmul();
const MatmulKernels& amx_matmul();
const MatmulKernels& played_amx_matmul();  // amx with tiles played in software; needs avx512_bf16

/// Whether two tables give the same results for a small product of each kind.
bool agree(const MatmulKernels& some, const MatmulKernels& others);

}  // namespace inferloop
