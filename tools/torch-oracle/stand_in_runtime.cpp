// A stand-in for the CUDA runtime: it models addresses and capacity only.
#include "stand_in_runtime.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#if CUDART_VERSION >= 12000 && CUDART_VERSION < 13000
#define DEVICE_PROPERTIES "cudaGetDeviceProperties_v2"
#else
#define DEVICE_PROPERTIES "cudaGetDeviceProperties"
#endif
#if CUDART_VERSION < 12000
typedef int cudaDriverEntryPointQueryResult;
enum { cudaDriverEntryPointSuccess = 0 };
#endif

namespace {

size_t total = 80ull << 30;
// What cudaMemGetInfo calls the total.
size_t memory_total = 80ull << 30;
size_t capacity = 80ull << 30;
bool downwards = false;
bool reuse = false;

size_t used = 0;
uint64_t next_segment = 0x7f0000000000ull;
uint64_t next_range = 0x600000000000ull;
uint64_t next_handle = 1;
std::map<uint64_t, size_t> segments;
// Freed segments, adjacent ones merged; only with `reuse`.
std::map<uint64_t, size_t> gaps;
// Segments and address ranges in the order of their creation.
std::vector<std::pair<const char*, uint64_t>> created;
std::map<uint64_t, size_t> handles;
std::map<void*, void*> event_streams;
std::set<void*> busy_streams;
cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
cudaError_t last_error = cudaSuccess;

bool take(size_t bytes) {
  if (used + bytes > capacity) return false;
  used += bytes;
  return true;
}

// The address of a new segment: in the first gap that holds it, otherwise beyond all others.
uint64_t place(size_t bytes) {
  auto fits = [bytes](auto& gap) { return gap.second >= bytes; };
  uint64_t start = 0, length = 0;
  for (auto& gap : gaps) {
    if (fits(gap) && (!length || downwards)) start = gap.first, length = gap.second;
  }
  if (length) {
    gaps.erase(start);
    if (downwards) {
      if (length > bytes) gaps[start] = length - bytes;
      return start + length - bytes;
    }
    if (length > bytes) gaps[start + bytes] = length - bytes;
    return start;
  }
  if (downwards) return next_segment -= bytes;
  next_segment += bytes;
  return next_segment - bytes;
}

void give_back(uint64_t address, size_t bytes) {
  auto after = gaps.find(address + bytes);
  if (after != gaps.end()) {
    bytes += after->second;
    gaps.erase(after);
  }
  for (auto& gap : gaps) {
    if (gap.first + gap.second == address) {
      gap.second += bytes;
      return;
    }
  }
  gaps[address] = bytes;
}

// All other driver functions do nothing.
CUresult succeed() { return CUDA_SUCCESS; }

}  // namespace

// The driver's memory functions. Releases up to 2.7 find them by name, later ones by cudaGetDriverEntryPoint.
extern "C" {

CUresult reserve(CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long) __asm__("cuMemAddressReserve");
CUresult address_free(CUdeviceptr, size_t) __asm__("cuMemAddressFree");
CUresult create(CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long) __asm__("cuMemCreate");
CUresult release(CUmemGenericAllocationHandle) __asm__("cuMemRelease");
CUresult map(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) __asm__("cuMemMap");
CUresult unmap(CUdeviceptr, size_t) __asm__("cuMemUnmap");
CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) __asm__("cuMemSetAccess");
CUresult attribute(int*, CUdevice_attribute, CUdevice) __asm__("cuDeviceGetAttribute");
CUresult error_string(CUresult, const char**) __asm__("cuGetErrorString");
CUresult granularity(size_t*, const CUmemAllocationProp*, CUmemAllocationGranularity_flags)
    __asm__("cuMemGetAllocationGranularity");
CUresult context_state(int, unsigned*, int*) __asm__("cuDevicePrimaryCtxGetState");

CUresult reserve(CUdeviceptr* address, size_t bytes, size_t, CUdeviceptr, unsigned long long) {
  constexpr uint64_t GIB = 1ull << 30;
  *address = next_range;
  next_range += (bytes + GIB) / GIB * GIB + GIB;
  created.emplace_back("range", *address);
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

CUresult address_free(CUdeviceptr, size_t) { return CUDA_SUCCESS; }

CUresult map(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long) { return CUDA_SUCCESS; }

CUresult unmap(CUdeviceptr, size_t) { return CUDA_SUCCESS; }

CUresult set_access(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

CUresult granularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *bytes = 2ull << 20;
  return CUDA_SUCCESS;
}

CUresult context_state(int, unsigned* flags, int* active) {
  *flags = 0;
  *active = 1;
  return CUDA_SUCCESS;
}

// Looked up by name and never called here.
#define UNUSED(name) \
  CUresult name##_unused() __asm__(#name); \
  CUresult name##_unused() { abort(); }
UNUSED(cuMemExportToShareableHandle)
UNUSED(cuMemImportFromShareableHandle)
UNUSED(cuMemRetainAllocationHandle)
UNUSED(cuMemGetAllocationPropertiesFromHandle)
UNUSED(cuMulticastAddDevice)
UNUSED(cuMulticastBindMem)
UNUSED(cuMulticastCreate)
UNUSED(cuMulticastUnbind)
UNUSED(cuMulticastGetGranularity)
UNUSED(cuStreamWriteValue32)
UNUSED(cuMemsetD32Async)
UNUSED(cuMemcpyDtoH)
UNUSED(cuCtxFromGreenCtx)
UNUSED(cuPointerGetAttribute)

}  // extern "C"

extern "C" {

void stand_in_device(size_t device_total, size_t device_capacity, bool device_downwards) {
  total = device_total;
  memory_total = device_total;
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

void stand_in_reuse() { reuse = true; }

void stand_in_print_created() {
  for (auto& one : created) std::cout << "created " << one.first << " " << one.second << "\n";
}

void stand_in_memory_total(size_t bytes) { memory_total = bytes; }

void stand_in_capture(bool active) {
  capture = active ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
}

cudaError_t cudaMalloc(void** address, size_t bytes) {
  if (!take(bytes)) return last_error = cudaErrorMemoryAllocation;
  uint64_t start = place(bytes);
  *address = reinterpret_cast<void*>(start);
  segments[start] = bytes;
  created.emplace_back("segment", start);
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
  if (reuse) give_back(segment->first, segment->second);
  segments.erase(segment);
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = capacity - used;
  *total_bytes = memory_total;
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

cudaError_t device_properties(cudaDeviceProp* properties, int) __asm__(DEVICE_PROPERTIES);
cudaError_t device_properties(cudaDeviceProp* properties, int) {
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
  *status = capture;
  return cudaSuccess;
}

// The number of arguments depends on the version of CUDA; the second one is always the status.
cudaError_t capture_info(cudaStream_t, cudaStreamCaptureStatus* status) __asm__("cudaStreamGetCaptureInfo");
cudaError_t capture_info(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = capture;
  return cudaSuccess;
}

cudaError_t capture_info_v2(cudaStream_t stream, cudaStreamCaptureStatus* status) __asm__("cudaStreamGetCaptureInfo_v2");
cudaError_t capture_info_v2(cudaStream_t stream, cudaStreamCaptureStatus* status) { return capture_info(stream, status); }
cudaError_t capture_info_v3(cudaStream_t stream, cudaStreamCaptureStatus* status) __asm__("cudaStreamGetCaptureInfo_v3");
cudaError_t capture_info_v3(cudaStream_t stream, cudaStreamCaptureStatus* status) { return capture_info(stream, status); }

cudaError_t cudaStreamQuery(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

cudaError_t entry_point(const char* symbol, void** function, cudaDriverEntryPointQueryResult* result) {
  static const std::map<std::string, void*> functions = {
      {"cuMemAddressReserve", reinterpret_cast<void*>(reserve)},
      {"cuMemCreate", reinterpret_cast<void*>(create)},
      {"cuMemRelease", reinterpret_cast<void*>(release)},
      {"cuDeviceGetAttribute", reinterpret_cast<void*>(attribute)},
      {"cuGetErrorString", reinterpret_cast<void*>(error_string)},
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(granularity)},
      {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(context_state)},
  };
  auto known = functions.find(symbol);
  *function = known == functions.end() ? reinterpret_cast<void*>(succeed) : known->second;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

cudaError_t entry_of_version(const char*, void**, unsigned, unsigned long long, cudaDriverEntryPointQueryResult*)
    __asm__("cudaGetDriverEntryPointByVersion");
cudaError_t entry_of_version(const char* symbol, void** function, unsigned, unsigned long long,
                             cudaDriverEntryPointQueryResult* result) {
  return entry_point(symbol, function, result);
}

cudaError_t entry_of_any_version(const char*, void**, unsigned long long, cudaDriverEntryPointQueryResult*)
    __asm__("cudaGetDriverEntryPoint");
cudaError_t entry_of_any_version(const char* symbol, void** function, unsigned long long,
                                 cudaDriverEntryPointQueryResult* result) {
  // CUDA 11 has three arguments.
  return entry_point(symbol, function, CUDART_VERSION >= 12000 ? result : nullptr);
}

}  // extern "C"
