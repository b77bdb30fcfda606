// Arrays of Python, seen in place: one call of the buffer protocol each, which is what a step can afford.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

namespace inferloop {

/// Holds on to the arrays that it has shown.
class Views {
 public:
  Views() = default;
  ~Views() { clear(); }
  Views(const Views&) = delete;
  Views& operator=(const Views&) = delete;

  void clear() {
    for (Py_buffer& buffer : buffers_) PyBuffer_Release(&buffer);
    buffers_.clear();
  }

  /// The numbers of attribute `name`, of which there are `count`. Throws std::invalid_argument for any other kind.
  template <class T>
  const T* array(nanobind::handle object, const char* name, size_t count) {
    return numbers<T>(object.attr(name), name, count);
  }

  template <class T>
  const T* numbers(nanobind::handle array, const char* name, size_t count) {
    const Py_buffer& buffer = show(array, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT);
    // One letter: others before it tell of another byte order, or of records.
    const std::string_view format = buffer.format == nullptr ? "B" : buffer.format;
    const std::string_view kinds = std::is_floating_point_v<T> ? "fd" : "bBhHiIlLqQ";
    if (buffer.itemsize != sizeof(T) || format.size() != 1 || kinds.find(format[0]) == kinds.npos)
      throw std::invalid_argument(std::string(name) + " has numbers of another kind");
    if (static_cast<size_t>(buffer.len) != count * sizeof(T))
      throw std::invalid_argument(std::string(name) + " has another length");
    return static_cast<const T*>(buffer.buf);
  }

  /// An array that may be written to.
  template <class T>
  T* writable(nanobind::handle array, const char* name, size_t count) {
    numbers<T>(array, name, count);
    if (buffers_.back().readonly) throw std::invalid_argument(std::string(name) + " cannot be written");
    return static_cast<T*>(buffers_.back().buf);
  }

 private:
  const Py_buffer& show(nanobind::handle array, int flags) {
    buffers_.emplace_back();
    if (PyObject_GetBuffer(array.ptr(), &buffers_.back(), flags) != 0) {
      buffers_.pop_back();
      throw nanobind::python_error();
    }
    return buffers_.back();
  }

  std::deque<Py_buffer> buffers_;
};

/// How many numbers an array has along its first axis.
inline size_t length_of(nanobind::handle array) { return nanobind::len(array); }

}  // namespace inferloop
