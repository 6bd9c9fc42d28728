// How the oracle steers the stand-in CUDA runtime.
#pragma once
#include <cstddef>

extern "C" {
// Size of the device, how much of it can be handed out, and whether addresses go down. Before anything else.
void stand_in_device(size_t total, size_t capacity, bool downwards);
// Whether events on a stream are unfinished.
void stand_in_busy(void* stream, bool busy);
}
