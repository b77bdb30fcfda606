#if defined(__x86_64__)
#include "amx_table.h"

namespace inferloop {

const MatmulKernels& amx_matmul() {
  static const MatmulKernels kernels = {tile_multiply<RealTiles>, tile_scratch_bytes, scalar_matmul().row};
  return kernels;
}

}  // namespace inferloop
#endif
