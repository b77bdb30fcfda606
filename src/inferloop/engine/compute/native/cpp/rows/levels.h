// The tables of the levels: one source (kernels.h), compiled for each.
#pragma once

#include "rows.h"

namespace inferloop {

const RowKernels& scalar_rows();
const RowKernels& avx2_rows();
const RowKernels& avx512_rows();

}  // namespace inferloop
