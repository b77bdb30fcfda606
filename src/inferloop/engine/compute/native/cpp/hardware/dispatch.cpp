#include "levels.h"

namespace inferloop {

const HardwareKernels& hardware_kernels([[maybe_unused]] Isa isa) {
#if defined(__x86_64__)
  switch (isa) {
    case Isa::avx2: return hardware_avx2();
    case Isa::avx512: return hardware_avx512();
    case Isa::avx512_bf16: return hardware_avx512_bf16();
    case Isa::amx: return hardware_amx();
    case Isa::scalar: break;
  }
#endif
  return hardware_scalar();
}

}  // namespace inferloop
