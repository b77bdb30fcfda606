// Row kernels, one register to 16 lanes.
#include "lanes.h"
#include "levels.h"

namespace inferloop {

const RowKernels& avx512_rows() { return kKernels; }

}  // namespace inferloop
