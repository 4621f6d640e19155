// A CUDA device that is not there: its memory is the host's, its kernels compute nothing, and what a real driver
// refuses inside a stream capture is refused and logged. libcuda.so.1 holds it, with the driver's interface;
// libcudart.so.13 puts the runtime's on top. Errors are cudaError_t and CUresult at once: their numbers agree.
#pragma once
#include <cstddef>
#include <string>

namespace fake {
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_FOUND = 500,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901, CAPTURE_UNMATCHED = 903, CAPTURE_ISOLATION = 905,
       CAPTURED_EVENT = 907 };
enum Kind { PAGEABLE, PINNED, DEVICE };
struct Capture;
struct Stream { int number; Capture* capture; unsigned flags; int priority; };

// A line of the process's log, $FAKE_GPU_LOG/<process>.log; nothing without that folder.
void say(const char* format, ...) __attribute__((format(printf, 1, 2)));
int stub(const char* name);  // a function that only returns success; its first call is logged

// What the device is: $FAKE_GPU_NAME, $FAKE_GPU_GIB, and an H100's attributes.
const char* name();
int attribute(int number);
void memory_info(size_t* free, size_t* total);

int allocate(void** address, size_t bytes);
int release(void* address);
int allocate_host(void** address, size_t bytes);
int release_host(void* address);
void register_host(void* address, size_t bytes);
Kind kind_of(const void* address);
int copy(void* to, const void* from, size_t bytes, void* stream, bool async, const char* call);
int set(void* to, int value, size_t bytes, void* stream);

Stream* find_stream(void* handle);
void make_stream(void** handle, unsigned flags, int priority);
int begin_capture(void* stream, int mode);
int end_capture(void* stream, void** graph);
int capture_status(void* stream, unsigned long long* id, void** graph);
int exchange_mode(int* mode);
void* make_graph();
size_t count_nodes(void* graph);
int replay(void* graph, void* stream);
int launch(const std::string& kernel, void* stream, unsigned programs, unsigned threads, const std::string& note);
int record_event(void* event, void* stream);
int wait_event(void* stream, void* event);
int ask_event(void* event, const char* call, bool wait);
int synchronize(const char* call);
int synchronize_stream(void* stream, const char* call, bool wait = true);
int check_unsafe(const char* call);  // calls that no capture in global mode stands, such as an allocation
}  // namespace fake
