// The smallest test harness that reports file, line and expression: the core has no dependency, not even here,
// so that `cmake -S cpp && ctest` works on a machine with nothing but a compiler.
#pragma once
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

// Whether these tests run under a sanitizer (gcc), which makes them many times as slow.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#if defined(__SANITIZE_THREAD__)
inline constexpr bool kThreadSanitized = true;
#else
inline constexpr bool kThreadSanitized = false;
#endif

namespace check {

struct Test {
  std::string name;
  std::function<void()> body;
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, std::function<void()> body, bool runs = true) {
    if (runs) tests().push_back({name, std::move(body)});
  }
};

// Whether it throws std::invalid_argument.
template <class Body>
bool refuses(Body&& body) {
  try {
    body();
  } catch (const std::invalid_argument&) {
    return true;
  }
  return false;
}

inline int run() {
  for (const auto& test : tests()) {
    test.body();
    std::printf("ok %s\n", test.name.c_str());
  }
  if (tests().empty()) std::printf("no tests\n");
  return tests().empty() ? 1 : 0;
}

}  // namespace check

#define TEST(name)                                            \
  static void test_##name();                                  \
  static check::Register register_##name(#name, test_##name); \
  static void test_##name()

// A test of one thread, which TSan leaves out: it would find no race in it, and take twenty times as long. Threads
// that read files where io_uring cannot be had are tested by themselves (test_disk_reader.cpp).
#define TEST_OF_ONE_THREAD(name)                                                 \
  static void test_##name();                                                     \
  static check::Register register_##name(#name, test_##name, !kThreadSanitized); \
  static void test_##name()

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (0)

#define CHECK_THROWS(statement, type)                                                         \
  do {                                                                                        \
    bool thrown = false;                                                                      \
    try {                                                                                     \
      statement;                                                                              \
    } catch (const type&) {                                                                   \
      thrown = true;                                                                          \
    }                                                                                         \
    if (!thrown) {                                                                            \
      std::fprintf(stderr, "%s:%d: no %s from: %s\n", __FILE__, __LINE__, #type, #statement); \
      std::exit(1);                                                                           \
    }                                                                                         \
  } while (0)

#define MAIN \
  int main() { return check::run(); }
