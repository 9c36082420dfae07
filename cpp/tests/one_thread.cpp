// Linked into tests in which nothing may race, as TSan is not asked about them: to start a thread there is refused.
#include <pthread.h>

#include <cstdio>
#include <cstdlib>

extern "C" int pthread_create(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*) noexcept {
  std::fputs("This test starts a thread: take it out of ONE_THREAD in cpp/CMakeLists.txt.\n", stderr);
  std::abort();
}
