#include "persia/isa.hpp"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace persia {
namespace {

constexpr const char* kVariable = "PERSIA_MAX_ISA";
constexpr std::string_view kNames[] = {"baseline", "avx2", "avx512"};

std::atomic<Isa>& in_use() {
  static std::atomic<Isa> isa = [] {
    const char* most = std::getenv(kVariable);
    if (most == nullptr || *most == '\0') return widest_isa();
    try {
      return std::min(widest_isa(), isa_of(most));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string(kVariable) + ": " + error.what());
    }
  }();
  return isa;
}

}  // namespace

std::string_view isa_name(Isa isa) { return kNames[static_cast<std::size_t>(isa)]; }

Isa isa_of(std::string_view name) {
  const auto* const found = std::find(std::begin(kNames), std::end(kNames), name);
  if (found == std::end(kNames)) {
    throw std::invalid_argument("unknown instruction set '" + std::string(name) + "': use baseline, avx2 or avx512");
  }
  return static_cast<Isa>(found - std::begin(kNames));
}

Isa widest_isa() {
#if defined(__x86_64__)
  // Older Clangs do not know "f16c" by name. That the system keeps the registers it needs is part of "avx2".
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  const bool avx2 =
      f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("popcnt");
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return !avx2 ? Isa::kBaseline : avx512 ? Isa::kAvx512 : Isa::kAvx2;
#else
  return Isa::kBaseline;
#endif
}

Isa isa() { return in_use().load(std::memory_order_relaxed); }

void use_isa(Isa isa) {
  if (isa > widest_isa()) {
    throw std::invalid_argument("this processor has no " + std::string(isa_name(isa)));
  }
  in_use() = isa;
}

}  // namespace persia
