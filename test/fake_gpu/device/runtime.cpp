// libcudart.so.13: what torch, sgl_kernel and JIT-compiled modules call of the runtime. Every other function is a stub.
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "fake.h"

#define API extern "C" __attribute__((visibility("default"))) cudaError_t
static const cudaError_t OK = cudaSuccess;
static thread_local cudaError_t last = cudaSuccess;
static cudaError_t end(int error) {
    if (error) last = static_cast<cudaError_t>(error);
    return static_cast<cudaError_t>(error);
}

API cudaGetLastError() { cudaError_t error = last; last = OK; return error; }
API cudaPeekAtLastError() { return last; }
extern "C" const char* cudaGetErrorString(cudaError_t error) {
    static thread_local char line[48];
    snprintf(line, sizeof line, "error %d of the fake GPU", error);
    return error ? line : "no error";
}
extern "C" const char* cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

API cudaGetDeviceCount(int* count) { *count = 1; return OK; }
API cudaGetDevice(int* device) { *device = 0; return OK; }
API cudaSetDevice(int device) { return end(device == 0 ? fake::SUCCESS : fake::INVALID_DEVICE); }
API cudaDriverGetVersion(int* version) { *version = 13000; return OK; }
API cudaRuntimeGetVersion(int* version) { *version = 13000; return OK; }
API cudaDeviceGetAttribute(int* value, cudaDeviceAttr number, int) { *value = fake::attribute(number); return OK; }
API cudaDeviceGetPCIBusId(char* text, int size, int) { snprintf(text, size, "0000:01:00.0"); return OK; }
API cudaDeviceGetStreamPriorityRange(int* least, int* most) { if (least) *least = 0; if (most) *most = -5; return OK; }
API cudaDeviceCanAccessPeer(int* can, int, int) { *can = 0; return OK; }
API cudaMemGetInfo(size_t* free, size_t* total) { fake::memory_info(free, total); return OK; }
API cudaGetDeviceProperties(cudaDeviceProp* p, int) {
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", fake::name());
    size_t free;
    fake::memory_info(&free, &p->totalGlobalMem);
    auto get = [](cudaDeviceAttr number) { return fake::attribute(number); };
    p->major = get(cudaDevAttrComputeCapabilityMajor);
    p->minor = get(cudaDevAttrComputeCapabilityMinor);
    p->multiProcessorCount = get(cudaDevAttrMultiProcessorCount);
    p->warpSize = get(cudaDevAttrWarpSize);
    p->sharedMemPerBlock = get(cudaDevAttrMaxSharedMemoryPerBlock);
    p->sharedMemPerBlockOptin = get(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    p->sharedMemPerMultiprocessor = get(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    p->reservedSharedMemPerBlock = get(cudaDevAttrReservedSharedMemoryPerBlock);
    p->regsPerBlock = p->regsPerMultiprocessor = get(cudaDevAttrMaxRegistersPerBlock);
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = get(cudaDevAttrMaxThreadsPerBlock);
    p->maxThreadsDim[2] = get(cudaDevAttrMaxBlockDimZ);
    p->maxGridSize[0] = get(cudaDevAttrMaxGridDimX);
    p->maxGridSize[1] = p->maxGridSize[2] = get(cudaDevAttrMaxGridDimY);
    p->maxThreadsPerMultiProcessor = get(cudaDevAttrMaxThreadsPerMultiProcessor);
    p->maxBlocksPerMultiProcessor = get(cudaDevAttrMaxBlocksPerMultiprocessor);
    p->totalConstMem = get(cudaDevAttrTotalConstantMemory);
    p->l2CacheSize = get(cudaDevAttrL2CacheSize);
    p->memoryBusWidth = get(cudaDevAttrGlobalMemoryBusWidth);
    p->asyncEngineCount = get(cudaDevAttrAsyncEngineCount);
    p->pciBusID = p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = 1;
    p->cooperativeLaunch = p->streamPrioritiesSupported = p->memoryPoolsSupported = p->clusterLaunch = 1;
    return OK;
}
extern "C" cudaError_t cudaGetDeviceProperties_v2(cudaDeviceProp* p, int device) { return cudaGetDeviceProperties(p, device); }
API cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) { *pool = reinterpret_cast<cudaMemPool_t>(0x10); return OK; }
API cudaDeviceGetMemPool(cudaMemPool_t* pool, int device) { return cudaDeviceGetDefaultMemPool(pool, device); }

API cudaMalloc(void** address, size_t bytes) { return end(fake::allocate(address, bytes)); }
API cudaFree(void* address) { return end(fake::release(address)); }
API cudaMallocAsync(void** address, size_t bytes, cudaStream_t) { return end(fake::allocate(address, bytes)); }
API cudaFreeAsync(void* address, cudaStream_t) { return end(fake::release(address)); }
API cudaMallocManaged(void** address, size_t bytes, unsigned) { return end(fake::allocate(address, bytes)); }
API cudaMallocHost(void** address, size_t bytes) { return end(fake::allocate_host(address, bytes)); }
API cudaHostAlloc(void** address, size_t bytes, unsigned) { return end(fake::allocate_host(address, bytes)); }
API cudaFreeHost(void* address) { return end(fake::release_host(address)); }
API cudaHostRegister(void* address, size_t bytes, unsigned) { fake::register_host(address, bytes); return OK; }
API cudaHostUnregister(void* address) { fake::register_host(address, 0); return OK; }
API cudaHostGetDevicePointer(void** device, void* host, unsigned) { *device = host; return OK; }
API cudaGetSymbolAddress(void** address, const void* symbol) { *address = const_cast<void*>(symbol); return OK; }
API cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
    fake::Kind kind = fake::kind_of(address);
    memset(found, 0, sizeof *found);
    found->type = kind == fake::DEVICE ? cudaMemoryTypeDevice : kind == fake::PINNED ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    found->device = kind == fake::PAGEABLE ? -2 : 0;
    found->devicePointer = kind == fake::PAGEABLE ? nullptr : const_cast<void*>(address);
    found->hostPointer = kind == fake::DEVICE ? nullptr : const_cast<void*>(address);
    return OK;
}
API cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) { return end(fake::copy(to, from, bytes, nullptr, false, "cudaMemcpy")); }
API cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) { return end(fake::copy(to, from, bytes, stream, true, "cudaMemcpyAsync")); }
API cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) { return end(fake::copy(to, from, bytes, stream, true, "cudaMemcpyPeerAsync")); }
API cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
    for (size_t i = 0; i < height; i++)
        if (int error = fake::copy(static_cast<char*>(to) + i * to_pitch, static_cast<const char*>(from) + i * from_pitch, width, stream, true, "cudaMemcpy2DAsync")) return end(error);
    return OK;
}
API cudaMemset(void* to, int value, size_t bytes) { return end(fake::set(to, value, bytes, nullptr)); }
API cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) { return end(fake::set(to, value, bytes, stream)); }

API cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) { fake::make_stream(reinterpret_cast<void**>(stream), flags, priority); return OK; }
API cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
API cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
API cudaStreamGetPriority(cudaStream_t stream, int* priority) { *priority = fake::find_stream(stream)->priority; return OK; }
API cudaStreamGetFlags(cudaStream_t stream, unsigned* flags) { *flags = fake::find_stream(stream)->flags; return OK; }
API cudaStreamGetId(cudaStream_t stream, unsigned long long* id) { *id = fake::find_stream(stream)->number; return OK; }
API cudaDeviceSynchronize() { return end(fake::synchronize("cudaDeviceSynchronize")); }
API cudaStreamSynchronize(cudaStream_t stream) { return end(fake::synchronize_stream(stream, "cudaStreamSynchronize")); }
API cudaStreamQuery(cudaStream_t stream) { return end(fake::synchronize_stream(stream, "cudaStreamQuery", false)); }
API cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) { return end(fake::wait_event(stream, event)); }

API cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) { return end(fake::begin_capture(stream, mode)); }
API cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) { return end(fake::end_capture(stream, reinterpret_cast<void**>(graph))); }
API cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) { *status = static_cast<cudaStreamCaptureStatus>(fake::capture_status(stream, nullptr, nullptr)); return OK; }
API cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
    *status = static_cast<cudaStreamCaptureStatus>(fake::capture_status(stream, id, reinterpret_cast<void**>(graph)));
    if (nodes) *nodes = nullptr;
    if (edges) *edges = nullptr;
    if (count) *count = 0;
    return OK;
}
extern "C" cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t* graph, const cudaGraphNode_t** nodes, const cudaGraphEdgeData** edges, size_t* count) {
    return cudaStreamGetCaptureInfo(stream, status, id, graph, nodes, edges, count);
}
API cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) { return end(fake::exchange_mode(reinterpret_cast<int*>(mode))); }
API cudaGraphCreate(cudaGraph_t* graph, unsigned) { *graph = static_cast<cudaGraph_t>(fake::make_graph()); return OK; }
API cudaGraphInstantiate(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) { *ready = reinterpret_cast<cudaGraphExec_t>(graph); return OK; }
API cudaGraphInstantiateWithFlags(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long flags) { return cudaGraphInstantiate(ready, graph, flags); }
API cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) { return end(fake::replay(ready, stream)); }
API cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, size_t* count) { if (!nodes) *count = fake::count_nodes(graph); return OK; }

struct Event { timespec at; };
API cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { *event = reinterpret_cast<cudaEvent_t>(new Event{}); return OK; }
API cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
API cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { clock_gettime(CLOCK_MONOTONIC, &reinterpret_cast<Event*>(event)->at); return end(fake::record_event(event, stream)); }
API cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) { return cudaEventRecord(event, stream); }
API cudaEventQuery(cudaEvent_t event) { return end(fake::ask_event(event, "cudaEventQuery", false)); }
API cudaEventSynchronize(cudaEvent_t event) { return end(fake::ask_event(event, "cudaEventSynchronize", true)); }
API cudaEventElapsedTime(float* ms, cudaEvent_t first, cudaEvent_t second) {
    const timespec &a = reinterpret_cast<Event*>(first)->at, &b = reinterpret_cast<Event*>(second)->at;
    *ms = (b.tv_sec - a.tv_sec) * 1e3f + (b.tv_nsec - a.tv_nsec) * 1e-6f;
    if (*ms <= 0) *ms = 1e-3f;  // callers divide by it
    return OK;
}
extern "C" cudaError_t cudaEventElapsedTime_v2(float* ms, cudaEvent_t first, cudaEvent_t second) { return cudaEventElapsedTime(ms, first, second); }

// Kernels by the address of their host function, as nvcc's code registers them.
static std::mutex lock;
static std::map<const void*, std::string>& kernels() { static auto* known = new std::map<const void*, std::string>; return *known; }
static std::string find_kernel(const void* host) { std::lock_guard<std::mutex> guard(lock); return kernels()[host]; }
static unsigned count(dim3 size) { return size.x * size.y * size.z; }
API cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) { return end(fake::launch(find_kernel(host), stream, count(grid), count(block), "")); }
API cudaLaunchCooperativeKernel(const void* host, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) { return end(fake::launch(find_kernel(host), stream, count(grid), count(block), " cooperative")); }
API cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* host, void**) { return end(fake::launch(find_kernel(host), c->stream, count(c->gridDim), count(c->blockDim), "")); }
API cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
    if (fake::capture_status(stream, nullptr, nullptr) == 0) function(data);
    return OK;
}
API cudaFuncGetAttributes(cudaFuncAttributes* found, const void*) {
    memset(found, 0, sizeof *found);
    found->maxThreadsPerBlock = 1024;
    found->numRegs = 32;
    found->ptxVersion = found->binaryVersion = 90;
    found->maxDynamicSharedSizeBytes = 232448;
    return OK;
}
// As many as threads and shared memory allow, of which a block has one KiB more; SGLang's probe of clusters checks both.
API cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads, size_t bytes) {
    *blocks = std::min(2048 / std::max(threads, 1), int(233472 / (bytes + 1024)));
    return OK;
}
API cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* kernel, int threads, size_t bytes, unsigned) { return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, kernel, threads, bytes); }
API cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*) { *clusters = 66; return OK; }
API cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long, cudaDriverEntryPointQueryResult* found) {
    static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    *function = dlsym(driver, name);
    if (!*function) *function = dlsym(driver, (std::string(name) + "_v2").c_str());
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return end(*function ? fake::SUCCESS : fake::NOT_FOUND);
}
API cudaGetDriverEntryPoint(const char* name, void** function, unsigned long long flags, cudaDriverEntryPointQueryResult* found) { return cudaGetDriverEntryPointByVersion(name, function, 13000, flags, found); }

extern "C" {
void** __cudaRegisterFatBinary(void*) { return static_cast<void**>(calloc(1, 64)); }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) { std::lock_guard<std::mutex> guard(lock); kernels()[host] = name; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, const char*, int, size_t, int, int) {}
char __cudaInitModule(void**) { return 1; }
struct Configuration { dim3 grid, block; size_t shared; void* stream; };
static thread_local Configuration pushed;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void* stream) { pushed = {grid, block, shared, stream}; return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
    *grid = pushed.grid;
    *block = pushed.block;
    *shared = pushed.shared;
    *static_cast<void**>(stream) = pushed.stream;
    return OK;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) { *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host)); return OK; }
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) { return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream); }
cudaError_t __cudaLaunchKernel_helper(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t stream) { return __cudaLaunchKernel(kernel, grid, block, arguments, shared, stream); }
}
