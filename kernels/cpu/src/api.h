// API(name) begins a function of the C ABI: built once for each instruction set, exported as diptych_<name>_<isa>.
#pragma once

#include <cstdint>

#include "simd.h"
#include "team.h"

#define DIPTYCH_JOIN_(name, isa) diptych_##name##_##isa
#define DIPTYCH_JOIN(name, isa) DIPTYCH_JOIN_(name, isa)
#define API(name) extern "C" __attribute__((visibility("default"))) void DIPTYCH_JOIN(name, DIPTYCH_ISA)

enum Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1 };
