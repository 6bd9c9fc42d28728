// A stand-in for the CUDA runtime: it models addresses and capacity only.
#include "stand_in_runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <set>
#include <string>

namespace {

size_t total = 80ull << 30;
size_t capacity = 80ull << 30;
bool downwards = false;

size_t used = 0;
uint64_t next_segment = 0x7f0000000000ull;
uint64_t next_range = 0x600000000000ull;
uint64_t next_handle = 1;
std::map<uint64_t, size_t> segments;
std::map<uint64_t, size_t> handles;
std::map<void*, void*> event_streams;
std::set<void*> busy_streams;
cudaError_t last_error = cudaSuccess;

bool take(size_t bytes) {
  if (used + bytes > capacity) return false;
  used += bytes;
  return true;
}

CUresult reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  constexpr uint64_t GIB = 1ull << 30;
  *address = next_range;
  next_range += (bytes + GIB) / GIB * GIB + GIB;
  return CUDA_SUCCESS;
}

CUresult create(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp*, unsigned long long) {
  if (!take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = next_handle++;
  handles[*handle] = bytes;
  return CUDA_SUCCESS;
}

CUresult release(CUmemGenericAllocationHandle handle) {
  used -= handles[handle];
  handles.erase(handle);
  return CUDA_SUCCESS;
}

CUresult attribute(int* value, CUdevice_attribute, CUdevice) {
  *value = 0;
  return CUDA_SUCCESS;
}

CUresult error_string(CUresult, const char** text) {
  *text = "stand-in";
  return CUDA_SUCCESS;
}

// All other driver functions do nothing.
CUresult succeed() { return CUDA_SUCCESS; }

}  // namespace

extern "C" {

void stand_in_device(size_t device_total, size_t device_capacity, bool device_downwards) {
  total = device_total;
  capacity = device_capacity;
  downwards = device_downwards;
}

void stand_in_busy(void* stream, bool busy) {
  if (busy) {
    busy_streams.insert(stream);
  } else {
    busy_streams.erase(stream);
  }
}

cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (!take(bytes)) return last_error = cudaErrorMemoryAllocation;
  if (downwards) next_segment -= bytes;
  *address = reinterpret_cast<void*>(next_segment);
  segments[next_segment] = bytes;
  if (!downwards) next_segment += bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  auto segment = segments.find(reinterpret_cast<uint64_t>(address));
  if (segment == segments.end()) {
    fprintf(stderr, "stand-in: cudaFree of %p, which is no segment\n", address);
    abort();
  }
  used -= segment->second;
  segments.erase(segment);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = capacity - used;
  *total_bytes = total;
  return cudaSuccess;
}

cudaError_t cudaGetLastError() {
  auto error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int) { return cudaSuccess; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  memset(properties, 0, sizeof *properties);
  properties->totalGlobalMem = total;
  properties->major = 9;
  strcpy(properties->name, "stand-in");
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t) { return "stand-in"; }
const char* cudaGetErrorName(cudaError_t) { return "stand-in"; }

cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  *event = static_cast<cudaEvent_t>(malloc(8));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event_streams[event] = stream;
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return busy_streams.count(event_streams[event]) ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  static uintptr_t next = 0x1000;
  *stream = reinterpret_cast<cudaStream_t>(next += 16);
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long*, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* count) {
  *status = cudaStreamCaptureStatusNone;
  if (count) *count = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> functions = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)}, {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},        {"cuDeviceGetAttribute", reinterpret_cast<void*>(attribute)},
      {"cuGetErrorString", reinterpret_cast<void*>(error_string)},
  };
  auto known = functions.find(symbol);
  *function = known == functions.end() ? reinterpret_cast<void*>(succeed) : known->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

}  // extern "C"
