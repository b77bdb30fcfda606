// Memory for weights of a step's own making: large, aligned, and in huge pages where the system has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace inferloop {

/// Zeroed pages that become real when they are first touched. Throws std::bad_alloc.
class Pages {
 public:
  Pages() = default;
  explicit Pages(size_t num_bytes);
  ~Pages();
  Pages(Pages&& other) noexcept;
  Pages& operator=(Pages&& other) noexcept;

  uint8_t* data() const { return data_; }
  size_t size() const { return num_bytes_; }

 private:
  uint8_t* base_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t num_bytes_ = 0;
  size_t num_mapped_ = 0;
};

/// Hands out pieces of one allocation, each 64-byte aligned. Run once over a null base it only counts.
class Carver {
 public:
  explicit Carver(uint8_t* base) : base_(base) {}

  template <class T>
  T* take(size_t count) {
    uint8_t* piece = base_ == nullptr ? nullptr : base_ + num_bytes_;
    num_bytes_ += (count * sizeof(T) + 63) & ~size_t{63};
    return reinterpret_cast<T*>(piece);
  }

  size_t num_bytes() const { return num_bytes_; }

 private:
  uint8_t* base_;
  size_t num_bytes_ = 0;
};

}  // namespace inferloop
