// libcuda.so.1: what Triton, torch, cuda-python and tvm-ffi call of the driver. Every other function of cuda.h is a stub.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "fake.h"

#define API extern "C" __attribute__((visibility("default"))) CUresult
static CUresult end(int error) { return static_cast<CUresult>(error); }
static const CUresult OK = CUDA_SUCCESS;
static CUcontext const CONTEXT = reinterpret_cast<CUcontext>(0x20);
struct Kernel { std::string name; };

API cuInit(unsigned) { return OK; }
API cuDriverGetVersion(int* version) { *version = 13000; return OK; }
API cuDeviceGetCount(int* count) { *count = 1; return OK; }
API cuDeviceGet(CUdevice* device, int number) { *device = number; return end(number == 0 ? fake::SUCCESS : fake::INVALID_DEVICE); }
API cuDeviceGetName(char* text, int size, CUdevice) { snprintf(text, size, "%s", fake::name()); return OK; }
API cuDeviceGetAttribute(int* value, CUdevice_attribute number, CUdevice) { *value = fake::attribute(number); return OK; }
API cuDeviceTotalMem_v2(size_t* total, CUdevice) { size_t free; fake::memory_info(&free, total); return OK; }
API cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice) { memset(uuid, 7, sizeof *uuid); return OK; }

API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { *context = CONTEXT; return OK; }
API cuDevicePrimaryCtxRelease_v2(CUdevice) { return OK; }
API cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) { *flags = 0; *active = 1; return OK; }
API cuCtxGetCurrent(CUcontext* context) { *context = CONTEXT; return OK; }
API cuCtxPopCurrent_v2(CUcontext* context) { *context = CONTEXT; return OK; }
API cuCtxGetDevice(CUdevice* device) { *device = 0; return OK; }
API cuCtxSynchronize() { return end(fake::synchronize("cuCtxSynchronize")); }

API cuGetErrorString(CUresult error, const char** text) {
    static thread_local char line[48];
    snprintf(line, sizeof line, "error %d of the fake GPU", error);
    *text = line;
    return OK;
}
API cuGetErrorName(CUresult error, const char** text) { return cuGetErrorString(error, text); }

API cuModuleLoadData(CUmodule* module, const void*) { *module = reinterpret_cast<CUmodule>(new Kernel{}); return end(fake::check_unsafe("loading a module")); }
API cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned, CUjit_option*, void**) { return cuModuleLoadData(module, image); }
API cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) { *function = reinterpret_cast<CUfunction>(new Kernel{name}); return OK; }
API cuLibraryLoadData(CUlibrary* library, const void*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) { *library = reinterpret_cast<CUlibrary>(new Kernel{}); return OK; }
// DeepGEMM loads a file of one kernel and asks which it is.
API cuLibraryLoadFromFile(CUlibrary* library, const char*, CUjit_option*, void**, unsigned, CUlibraryOption*, void**, unsigned) { *library = reinterpret_cast<CUlibrary>(new Kernel{}); return OK; }
API cuLibraryGetKernelCount(unsigned* count, CUlibrary) { *count = 1; return OK; }
API cuLibraryEnumerateKernels(CUkernel* kernels, unsigned, CUlibrary) { *kernels = reinterpret_cast<CUkernel>(new Kernel{"deep_gemm"}); return OK; }
API cuLibraryGetKernel(CUkernel* kernel, CUlibrary, const char* name) { *kernel = reinterpret_cast<CUkernel>(new Kernel{name}); return OK; }
API cuKernelGetFunction(CUfunction* function, CUkernel kernel) { *function = reinterpret_cast<CUfunction>(kernel); return OK; }
API cuFuncGetAttribute(int* value, CUfunction_attribute number, CUfunction) {
    *value = number == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return OK;
}
API cuOccupancyMaxActiveClusters(int* count, CUfunction, const CUlaunchConfig*) { *count = 66; return OK; }
API cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, CUfunction, int, size_t) { *count = 2; return OK; }

API cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void**, void**) {
    std::string note;
    for (unsigned i = 0; i < c->numAttrs; i++) {
        const CUlaunchAttribute& given = c->attrs[i];
        if (given.id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE && given.value.cooperative) note += " cooperative";
        if (given.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) note += " early";
    }
    return end(fake::launch(reinterpret_cast<Kernel*>(function)->name, c->hStream, c->gridDimX * c->gridDimY * c->gridDimZ, c->blockDimX * c->blockDimY * c->blockDimZ, note));
}
API cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned, CUstream stream, void**, void**) {
    return end(fake::launch(reinterpret_cast<Kernel*>(function)->name, stream, gx * gy * gz, bx * by * bz, ""));
}

API cuPointerGetAttribute(void* value, CUpointer_attribute number, CUdeviceptr address) {
    fake::Kind kind = fake::kind_of(reinterpret_cast<void*>(address));
    if (kind == fake::PAGEABLE) return end(fake::INVALID_VALUE);
    if (number == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *static_cast<CUdeviceptr*>(value) = address;
    else *static_cast<int*>(value) = number != CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? 0 : kind == fake::DEVICE ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
    return OK;
}
API cuPointerGetAttributes(unsigned count, CUpointer_attribute* numbers, void** values, CUdeviceptr address) {
    for (unsigned i = 0; i < count; i++) cuPointerGetAttribute(values[i], numbers[i], address);
    return OK;
}
API cuMemGetInfo_v2(size_t* free, size_t* total) { fake::memory_info(free, total); return OK; }
API cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) { return end(fake::allocate(reinterpret_cast<void**>(address), bytes)); }
API cuMemFree_v2(CUdeviceptr address) { return end(fake::release(reinterpret_cast<void*>(address))); }
API cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) { return end(fake::copy(reinterpret_cast<void*>(to), from, bytes, nullptr, false, "cuMemcpyHtoD")); }
API cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) { return end(fake::copy(to, reinterpret_cast<void*>(from), bytes, nullptr, false, "cuMemcpyDtoH")); }
API cuStreamSynchronize(CUstream stream) { return end(fake::synchronize_stream(stream, "cuStreamSynchronize")); }

API cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* found) {
    void* self = dlopen("libcuda.so.1", RTLD_NOW);
    *function = dlsym(self, name);
    if (!*function) *function = dlsym(self, (std::string(name) + "_v2").c_str());
    if (found) *found = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (!*function) fake::say("no driver function %s", name);
    return end(*function ? fake::SUCCESS : fake::NOT_FOUND);
}
API cuGetExportTable(const void**, const CUuuid*) { return end(fake::NOT_FOUND); }
