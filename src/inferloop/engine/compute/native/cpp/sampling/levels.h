// The kernels of each level; only to be called for levels that the machine has.
#pragma once

#include "kernels.h"

namespace inferloop {

const SamplingKernels& scalar_sampling();
const SamplingKernels& avx2_sampling();
const SamplingKernels& avx512_sampling();

}  // namespace inferloop
