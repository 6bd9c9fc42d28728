// Control functions of the stand-in CUDA runtime, for the oracle.
#pragma once
#include <cstddef>

extern "C" {
// Size of the device, its allocatable bytes, and whether addresses go down. Call it first.
void stand_in_device(size_t total, size_t capacity, bool downwards);
// New segments take the place of freed ones. Otherwise no address is used twice.
void stand_in_reuse();
// Prints the segments and address ranges in the order of their creation.
void stand_in_print_created();
// What cudaMemGetInfo calls the total, if it is not the size of the device.
void stand_in_memory_total(size_t bytes);
// Sets whether a stream capture is under way, in which every stream takes part.
void stand_in_capture(bool active);
// Sets whether events on a stream are unfinished.
void stand_in_busy(void* stream, bool busy);
}
