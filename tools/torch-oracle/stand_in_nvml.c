// A stand-in for NVML that knows of no process and no link.
int nvmlInit_v2(void) { return 0; }

int nvmlDeviceGetHandleByPciBusId_v2(const char* id, void** device) {
  *device = 0;
  return 0;
}

int nvmlDeviceGetComputeRunningProcesses(void* device, unsigned* count, void* processes) {
  *count = 0;
  return 0;
}

// Not supported.
int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
