// Conversion of arrays and other arguments for the core, without copies.
#pragma once
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace bindings {

namespace nb = nanobind;

// A borrowed array, by the buffer protocol: five times cheaper than nb::ndarray, which counts with 26 features and
// three arrays each.
class Buffer {
 public:
  Buffer() { view_.obj = nullptr; }
  // The view may point into itself, so its pointers are not used after `open`.
  Buffer(Buffer&& other) noexcept : view_(other.view_), contiguous_(other.contiguous_) {
    std::copy(other.shape_, other.shape_ + kAxes, shape_);
    std::copy(other.strides_, other.strides_ + kAxes, strides_);
    other.view_.obj = nullptr;
  }
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }

  // False if it is not an aligned array of one of the `formats` (of the struct module) with at most three axes.
  bool open(nb::handle object, std::string_view formats, bool writable) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_STRIDED_RO | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) !=
        0) {
      PyErr_Clear();
      view_.obj = nullptr;
      return false;
    }
    const bool known = view_.format != nullptr && view_.format[0] != 0 && view_.format[1] == 0 &&
                       formats.find(view_.format[0]) != std::string_view::npos && view_.ndim <= kAxes;
    if (!known || reinterpret_cast<std::uintptr_t>(view_.buf) % static_cast<std::size_t>(view_.itemsize) != 0) {
      return false;
    }
    contiguous_ = PyBuffer_IsContiguous(&view_, 'C') != 0;
    for (int axis = 0; axis < view_.ndim; ++axis) {
      shape_[axis] = static_cast<std::size_t>(view_.shape[axis]);
      // Strides of an array without items say nothing.
      if (size() != 0 && view_.strides[axis] % view_.itemsize != 0) return false;
      strides_[axis] = view_.strides[axis] / view_.itemsize;
    }
    return true;
  }

  char format() const { return view_.format[0]; }
  std::size_t ndim() const { return static_cast<std::size_t>(view_.ndim); }
  std::size_t shape(std::size_t axis) const { return shape_[axis]; }
  std::ptrdiff_t stride(std::size_t axis) const { return strides_[axis]; }
  std::size_t itemsize() const { return static_cast<std::size_t>(view_.itemsize); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len / view_.itemsize); }
  bool contiguous() const { return contiguous_; }
  template <class T>
  T* data() const {
    return static_cast<T*>(view_.buf);
  }
  template <class T>
  std::span<T> span() const {
    return {data<T>(), size()};
  }

 private:
  static constexpr int kAxes = 3;
  Py_buffer view_;
  bool contiguous_ = false;
  std::size_t shape_[kAxes] = {};
  std::ptrdiff_t strides_[kAxes] = {};
};

// Formats of the types, as numpy writes them.
template <class T>
inline constexpr std::string_view kFormats = "";
template <>
inline constexpr std::string_view kFormats<bool> = "?";
template <>
inline constexpr std::string_view kFormats<float> = "f";
template <>
inline constexpr std::string_view kFormats<double> = "d";
template <>
inline constexpr std::string_view kFormats<std::uint8_t> = "B";
template <>
inline constexpr std::string_view kFormats<std::uint16_t> = "H";
template <>
inline constexpr std::string_view kFormats<std::uint32_t> = "I";
template <>
inline constexpr std::string_view kFormats<std::int32_t> = sizeof(long) == 4 ? "il" : "i";
template <>
inline constexpr std::string_view kFormats<std::int64_t> = sizeof(long) == 8 ? "lq" : "q";
template <>
inline constexpr std::string_view kFormats<std::uint64_t> = sizeof(long) == 8 ? "LQ" : "Q";

// Names an argument in error messages; formats the text only when needed.
struct Where {
  const char* kind;
  std::size_t index;
  const char* part = "";
  [[noreturn]] void fail(const std::string& what) const {
    throw nb::value_error((std::string(kind) + " " + std::to_string(index) + part + ": " + what).c_str());
  }
};

// Any strides.
template <class T>
Buffer take(nb::handle object, const Where& where, const char* expected) {
  Buffer buffer;
  if (!buffer.open(object, kFormats<std::remove_const_t<T>>, !std::is_const_v<T>)) {
    where.fail(std::string("must be ") + expected);
  }
  return buffer;
}

template <class T>
Buffer take_dense(nb::handle object, std::size_t ndim, const Where& where, const char* expected) {
  Buffer buffer = take<T>(object, where, expected);
  if (buffer.ndim() != ndim || !buffer.contiguous()) where.fail(std::string("must be ") + expected);
  return buffer;
}

inline nb::list take_list(nb::handle object, const Where& where) {
  nb::list list;
  if (!nb::try_cast(object, list, false)) where.fail("must be a list");
  return list;
}

inline std::size_t take_size(nb::handle object, const Where& where) {
  std::size_t value = 0;
  if (!nb::try_cast(object, value, false)) where.fail("must be an int >= 0");
  return value;
}

}  // namespace bindings
