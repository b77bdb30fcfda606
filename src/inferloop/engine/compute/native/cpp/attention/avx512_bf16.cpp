#include "levels.h"

#if defined(__AVX512BF16__)
#include "codes.h"
#include "dots512.h"
#include "halves_bf16.h"
#include "lanes512.h"
#include "write512.h"

namespace inferloop {
namespace {

using OfHalves = Flash<Lanes, HalvesBf16>;
using OfCodes = Flash<Lanes, Codes<Lanes, Dots, 3, 4>>;

size_t scratch_bytes(int head_dim, int num_queries) {
  const size_t a = OfHalves::scratch_bytes(head_dim, num_queries), b = OfCodes::scratch_bytes(head_dim, num_queries);
  return a < b ? b : a;
}

}  // namespace

const AttentionKernels& avx512_bf16_attention_kernels() {
  static constexpr AttentionKernels kernels = {write, {OfHalves::attend, OfCodes::attend}, scratch_bytes, fold_parts};
  return kernels;
}

}  // namespace inferloop
#endif
