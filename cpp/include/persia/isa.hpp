// Instruction sets of the hot loops. The library is compiled for any x86-64 processor; the loops that gain by it are
// compiled for the wider sets, too, and chosen at run time. Results have the same bits in each (but those of a NaN):
// no loop reorders a sum, and -ffp-contract=off keeps a*b+c two operations.
#pragma once
#include <string_view>

// Marks a function that is compiled for kAvx512, its loops in vectors of 512 bits. Clang does not know the last option,
// and would ignore the whole list for it.
#if defined(__clang__)
#define PERSIA_AVX512 [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl")]]
#else
#define PERSIA_AVX512 [[gnu::target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")]]
#endif

namespace persia {

// Each one includes those before it. kAvx2: AVX2, F16C, PCLMULQDQ and POPCNT. kAvx512: its parts F, BW, DQ and VL.
// Processors of other architectures have the first one only.
enum class Isa { kBaseline, kAvx2, kAvx512 };

// Returns the name: "baseline", "avx2" or "avx512".
std::string_view isa_name(Isa isa);

// Returns the instruction set of this name. Throws std::invalid_argument for an unknown one.
Isa isa_of(std::string_view name);

// Returns the widest instruction set of this processor.
Isa widest_isa();

// Returns the instruction set in use: the widest one, but none above that which PERSIA_MAX_ISA names. Throws
// std::invalid_argument if the variable has another value.
Isa isa();

// For tests: uses an instruction set for what is called from now on, and by tables that are created from now on.
// Throws std::invalid_argument if the processor does not have it.
void use_isa(Isa isa);

}  // namespace persia
