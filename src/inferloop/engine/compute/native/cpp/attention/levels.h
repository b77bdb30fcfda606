// The kernels of each level.
#pragma once

#include "attention.h"

namespace inferloop {

const AttentionKernels& scalar_attention_kernels();
const AttentionKernels& avx2_attention_kernels();
const AttentionKernels& avx512_attention_kernels();
const AttentionKernels& avx512_bf16_attention_kernels();

}  // namespace inferloop
