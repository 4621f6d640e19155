// libnvidia-ml.so.1: what SGLang and FlashInfer ask of the management library.
#include <cstdio>
#include <cstring>

#include "fake.h"

#define API extern "C" __attribute__((visibility("default"))) int
static void* const DEVICE_HANDLE = reinterpret_cast<void*>(1);
struct Memory { unsigned long long total, free, used; };

API nvmlInit_v2() { return 0; }
API nvmlInitWithFlags(unsigned) { return 0; }
API nvmlShutdown() { return 0; }
extern "C" const char* nvmlErrorString(int) { return "an error of the fake GPU"; }
API nvmlDeviceGetCount_v2(unsigned* count) { *count = 1; return 0; }
API nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { *device = DEVICE_HANDLE; return 0; }
API nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { *device = DEVICE_HANDLE; return 0; }
API nvmlDeviceGetHandleByUUID(const char*, void** device) { *device = DEVICE_HANDLE; return 0; }
API nvmlDeviceGetName(void*, char* text, unsigned size) { snprintf(text, size, "%s", fake::name()); return 0; }
API nvmlDeviceGetUUID(void*, char* text, unsigned size) { snprintf(text, size, "GPU-00000000-0000-0000-0000-000000000000"); return 0; }
API nvmlSystemGetDriverVersion(char* text, unsigned size) { snprintf(text, size, "580.0"); return 0; }
API nvmlDeviceGetMemoryInfo(void*, Memory* found) {
    size_t free, total;
    fake::memory_info(&free, &total);
    *found = {total, free, total - free};
    return 0;
}
API nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) { *major = 9; *minor = 0; return 0; }
API nvmlDeviceGetCpuAffinity(void*, unsigned words, unsigned long* set) { memset(set, 0xff, words * sizeof *set); return 0; }
API nvmlDeviceGetCpuAffinityWithinScope(void* device, unsigned words, unsigned long* set, unsigned) { return nvmlDeviceGetCpuAffinity(device, words, set); }
API nvmlDeviceGetTopologyCommonAncestor(void*, void*, int* level) { *level = 0; return 0; }
