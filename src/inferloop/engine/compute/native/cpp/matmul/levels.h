// The tables of the levels, each in a file of its own.
#pragma once

#include "matmul.h"

namespace inferloop {

const MatmulKernels& scalar_matmul();

}  // namespace inferloop
