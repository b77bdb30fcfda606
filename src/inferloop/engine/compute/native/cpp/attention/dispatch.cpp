#include "attention.h"

namespace inferloop {

const AttentionKernels& scalar_attention_kernels();

const AttentionKernels& attention_kernels(Isa) { return scalar_attention_kernels(); }

}  // namespace inferloop
