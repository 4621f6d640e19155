// The device's memory, its log, and what it says of itself.
#include "fake.h"

#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "capture.h"

namespace fake {
std::recursive_mutex lock;
namespace {
using Blocks = std::map<const char*, size_t>;  // never destroyed: libraries free memory after our destructors
Blocks& device_blocks = *new Blocks;
Blocks& pinned_blocks = *new Blocks;
size_t used, peak;
const size_t SLIGHT = 1 << 20;  // larger copies and zeroes on the device would turn reserved pages into real ones

size_t total() {
    const char* given = getenv("FAKE_GPU_GIB");
    const double gib = given ? atof(given) : 79.1;
    if (gib <= 0) {
        fprintf(stderr, "FAKE_GPU_GIB=%s: allowed is a number of GiB above 0\n", given);
        _exit(1);
    }
    return static_cast<size_t>(gib * (1ull << 30));
}

FILE* open_log() {
    const char* folder = getenv("FAKE_GPU_LOG");
    if (!folder) return nullptr;
    char path[4096];
    snprintf(path, sizeof path, "%s/%d.log", folder, getpid());
    FILE* file = fopen(path, "a");
    if (file) setvbuf(file, nullptr, _IOLBF, 1 << 14);
    return file;
}

int map(Blocks& blocks, void** address, size_t bytes) {
    size_t size = (bytes + 4095) & ~size_t{4095};
    void* block = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (block == MAP_FAILED) return OUT_OF_MEMORY;
    blocks[static_cast<char*>(block)] = size;
    *address = block;
    return SUCCESS;
}

size_t unmap(Blocks& blocks, void* address) {
    auto found = blocks.find(static_cast<char*>(address));
    if (found == blocks.end()) return 0;
    size_t size = found->second;
    munmap(address, size);
    blocks.erase(found);
    return size;
}

bool holds(const Blocks& blocks, const void* address) {
    auto after = blocks.upper_bound(static_cast<const char*>(address));
    if (after == blocks.begin()) return false;
    --after;
    return static_cast<const char*>(address) < after->first + after->second;
}
}  // namespace

void say(const char* format, ...) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    static int process = 0;
    static FILE* log = nullptr;
    if (process != getpid()) {  // a forked child writes its own
        process = getpid();
        log = open_log();
    }
    if (!log) return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(log, format, arguments);
    va_end(arguments);
    fputc('\n', log);
}

int stub(const char* name) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    static std::map<std::string, int>& calls = *new std::map<std::string, int>;
    if (calls[name]++ == 0) say("stub %s", name);
    return SUCCESS;
}

const char* name() {
    const char* given = getenv("FAKE_GPU_NAME");
    return given ? given : "NVIDIA H100 80GB HBM3";
}

void memory_info(size_t* free, size_t* all) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    *all = total();
    *free = *all - used;
}

int allocate(void** address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    *address = nullptr;
    if (int error = check_unsafe("an allocation")) return error;
    if (bytes == 0) return SUCCESS;
    if (used + bytes > total()) {
        say("out of memory: %zu bytes asked, %zu in use", bytes, used);
        return OUT_OF_MEMORY;
    }
    if (int error = map(device_blocks, address, bytes)) return error;
    used += device_blocks[static_cast<char*>(*address)];
    if (used > peak) peak = used;
    return SUCCESS;
}

int release(void* address) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (!address) return SUCCESS;
    if (int error = check_unsafe("a deallocation")) return error;
    size_t size = unmap(device_blocks, address);
    used -= size;
    return size ? SUCCESS : INVALID_VALUE;
}

int allocate_host(void** address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (int error = check_unsafe("an allocation of pinned memory")) return error;
    return map(pinned_blocks, address, bytes ? bytes : 1);
}

int release_host(void* address) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    unmap(pinned_blocks, address);
    return SUCCESS;
}

void register_host(void* address, size_t bytes) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (bytes) pinned_blocks[static_cast<char*>(address)] = bytes;
    else pinned_blocks.erase(static_cast<char*>(address));
}

Kind kind_of(const void* address) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    return holds(device_blocks, address) ? DEVICE : holds(pinned_blocks, address) ? PINNED : PAGEABLE;
}

void move(void* to, const void* from, size_t bytes) {
    if (bytes <= SLIGHT || kind_of(to) != DEVICE || kind_of(from) != DEVICE) memmove(to, from, bytes);
}

void fill(void* to, int value, size_t bytes) {
    if (value != 0 || bytes <= SLIGHT) memset(to, value, bytes);
}

int attribute(int number) {
    switch (number) {  // of the driver; the runtime's have the same numbers
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 49152;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return 233472;
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1980000;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 2619000;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 5120;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 52428800;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 132;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 2048;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 32;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return 0;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 3;
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: return 1;
        default: return 0;
    }
}

__attribute__((destructor)) static void say_peak() {
    if (peak) say("end: %zu MiB of the device at most", peak >> 20);
}
}  // namespace fake

// For Python: 2 of device memory, 1 of pinned memory.
extern "C" int fake_gpu_kind(const void* address) { return fake::kind_of(address); }
extern "C" void fake_gpu_say(const char* line) { fake::say("%s", line); }
