// Row kernels, two registers to 16 lanes.
#include "kernels.h"
#include "levels.h"

namespace inferloop {

const RowKernels& avx2_rows() { return kKernels; }

}  // namespace inferloop
