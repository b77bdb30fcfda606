// The getters of the levels that are compiled for this processor family.
#pragma once

#include "hardware.h"

namespace inferloop {

const HardwareKernels& hardware_scalar();
#if defined(__x86_64__)
const HardwareKernels& hardware_avx2();
const HardwareKernels& hardware_avx512();
const HardwareKernels& hardware_avx512_bf16();
const HardwareKernels& hardware_amx();
#endif

}  // namespace inferloop
