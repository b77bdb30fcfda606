// The kernels of the level amx on tiles that are played in software: they can be tested without the hardware.
#if defined(__x86_64__)
#include "../amx_table.h"

namespace inferloop {

const MatmulKernels& played_amx_matmul() {
  static const MatmulKernels kernels = {tile_multiply<PlayedTiles>, tile_scratch_bytes, scalar_matmul().row};
  return kernels;
}

}  // namespace inferloop
#endif
