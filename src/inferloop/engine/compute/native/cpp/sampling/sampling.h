// From logits to tokens: greedy, Gumbel-max after top-k, top-p and min-p, penalties, bias, masks, log-probabilities.
//
// (Declared by whoever writes it. It must repeat engine/compute/philox.py bit for bit.)
#pragma once

#include "../isa.h"
#include "../types.h"
