// Row kernels, what every machine runs.
#include "kernels.h"
#include "levels.h"

namespace inferloop {

const RowKernels& scalar_rows() { return kKernels; }

}  // namespace inferloop
