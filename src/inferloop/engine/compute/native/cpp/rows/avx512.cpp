// Row kernels, one register to 16 lanes.
#include "kernels.h"
#include "levels.h"

namespace inferloop {

const RowKernels& avx512_rows() { return kKernels; }

}  // namespace inferloop
