#include "kernels.h"

namespace inferloop {

extern const SamplingKernels kScalarSampling;

const SamplingKernels& sampling_kernels([[maybe_unused]] Isa isa) { return kScalarSampling; }

}  // namespace inferloop
