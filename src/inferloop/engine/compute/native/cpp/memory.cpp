#include "memory.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace inferloop {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

Pages::Pages(size_t num_bytes) : num_bytes_(num_bytes), num_mapped_(num_bytes + kHugePage) {
  void* mapped = mmap(nullptr, num_mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  base_ = static_cast<uint8_t*>(mapped);
  const size_t ahead = -reinterpret_cast<uintptr_t>(base_) % kHugePage;
  data_ = base_ + ahead;
#if defined(MADV_HUGEPAGE)
  // A wish. Small memory is left alone: a huge page for some kilobytes is a waste.
  if (num_bytes >= kHugePage) madvise(data_, num_bytes, MADV_HUGEPAGE);
#endif
}

Pages::~Pages() {
  if (base_ != nullptr) munmap(base_, num_mapped_);
}

Pages::Pages(Pages&& other) noexcept { *this = std::move(other); }

Pages& Pages::operator=(Pages&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(data_, other.data_);
  std::swap(num_bytes_, other.num_bytes_);
  std::swap(num_mapped_, other.num_mapped_);
  return *this;
}

}  // namespace inferloop
