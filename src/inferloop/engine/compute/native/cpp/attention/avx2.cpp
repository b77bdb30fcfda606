#include "levels.h"

#if defined(__AVX2__)
#include "codes.h"
#include "dots256.h"
#include "halves_fp32.h"
#include "lanes256.h"

namespace inferloop {
namespace {

using OfHalves = Flash<Lanes, HalvesFp32<Lanes, 4, 1>>;
using OfCodes = Flash<Lanes, Codes<Lanes, Dots, 2, 1>>;

size_t scratch_bytes(int head_dim, int num_queries) {
  const size_t a = OfHalves::scratch_bytes(head_dim, num_queries), b = OfCodes::scratch_bytes(head_dim, num_queries);
  return a < b ? b : a;
}

}  // namespace

const AttentionKernels& avx2_attention_kernels() {
  static const AttentionKernels kernels = {
      scalar_attention_kernels().write, {OfHalves::attend, OfCodes::attend}, scratch_bytes, fold_parts};
  return kernels;
}

}  // namespace inferloop
#endif
