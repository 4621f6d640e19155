// Streams, events and captures, by the rules of CUDA's programming guide, section "Stream Capture": what would break a
// real capture is a line "VIOLATION ..." and the same error. Work outside captures is done when it is asked for.
#include "capture.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <vector>

#include "fake.h"

namespace fake {
namespace {
enum Mode { GLOBAL, THREAD_LOCAL, RELAXED };
struct Node { enum { KERNEL, COPY, FILL, CHILD } kind; std::string what; void* to; const void* from; size_t bytes; int value; };
struct Graph { std::vector<Node> nodes; };

std::vector<Capture*>& captures = *new std::vector<Capture*>;  // those under way
std::map<void*, Capture*>& captured_events = *new std::map<void*, Capture*>;
Stream legacy{0, nullptr, 0, 0};
unsigned long long captured, replayed;
thread_local int thread_mode = GLOBAL;
thread_local int waits;  // how often this thread has waited for the device

long thread() { return syscall(SYS_gettid); }
bool is_open(Capture* capture) { return std::find(captures.begin(), captures.end(), capture) != captures.end(); }
}  // namespace

struct Capture {
    unsigned long long number;
    int mode;
    long thread;
    Graph* graph;
    std::set<Stream*> streams;
    bool broken;
};

namespace {
int violate(Capture* capture, int error, const char* what, const char* why) {
    capture->broken = true;
    say("VIOLATION %s %s (capture %llu)", what, why, capture->number);
    return error;
}

void add(Capture* capture, Node node) { capture->graph->nodes.push_back(std::move(node)); }
}  // namespace

Stream* find_stream(void* handle) {  // null, legacy and per-thread: one stream
    return reinterpret_cast<size_t>(handle) <= 2 ? &legacy : static_cast<Stream*>(handle);
}

void make_stream(void** handle, unsigned flags, int priority) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    static int streams = 0;
    *handle = new Stream{++streams, nullptr, flags, priority};
}

int check_unsafe(const char* call) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (thread_mode == RELAXED) return SUCCESS;
    for (Capture* capture : captures)
        if (capture->mode == GLOBAL || (capture->mode == THREAD_LOCAL && capture->thread == thread()))
            return violate(capture, CAPTURE_UNSUPPORTED, call, capture->thread == thread() ? "in a capture" : "in another thread's capture");
    return SUCCESS;
}

int exchange_mode(int* mode) {
    std::swap(thread_mode, *mode);
    return SUCCESS;
}

int begin_capture(void* handle, int mode) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* stream = find_stream(handle);
    if (stream == &legacy) {
        say("VIOLATION a capture of the legacy stream");
        return CAPTURE_UNSUPPORTED;
    }
    if (stream->capture) return INVALID_VALUE;
    stream->capture = new Capture{++captured, mode, thread(), new Graph, {stream}, false};
    captures.push_back(stream->capture);
    return SUCCESS;
}

int end_capture(void* handle, void** graph) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Capture* capture = find_stream(handle)->capture;
    *graph = nullptr;
    if (!capture) return CAPTURE_UNMATCHED;
    for (Stream* stream : capture->streams) stream->capture = nullptr;
    captures.erase(std::find(captures.begin(), captures.end(), capture));
    auto& nodes = capture->graph->nodes;
    auto count = [&](int kind) { return std::count_if(nodes.begin(), nodes.end(), [&](auto& node) { return node.kind == kind; }); };
    say("capture %llu: %ld kernels, %ld copies, %ld fills%s", capture->number, (long)count(Node::KERNEL), (long)count(Node::COPY), (long)count(Node::FILL), capture->broken ? ", BROKEN" : "");
    if (getenv("FAKE_GPU_NODES"))
        for (auto& node : nodes) say("node %llu %s", capture->number, node.what.c_str());
    if (capture->broken) return CAPTURE_INVALIDATED;
    *graph = capture->graph;
    return SUCCESS;
}

int capture_status(void* handle, unsigned long long* id, void** graph) {
    Capture* capture = find_stream(handle)->capture;
    if (!capture) return 0;
    if (id) *id = capture->number;
    if (graph) *graph = capture->graph;
    return capture->broken ? 2 : 1;
}

void* make_graph() { return new Graph; }
size_t count_nodes(void* graph) { return static_cast<Graph*>(graph)->nodes.size(); }

int replay(void* handle, void* stream) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (Capture* capture = find_stream(stream)->capture) {
        add(capture, {Node::CHILD, "a graph", nullptr, nullptr, 0, 0});
        return SUCCESS;
    }
    if (++replayed % 1000 == 1) say("replay %llu", replayed);
    if (getenv("FAKE_GPU_VALUES")) return SUCCESS;  // values.py does all of it, in order
    for (Node& node : static_cast<Graph*>(handle)->nodes) {
        if (node.kind == Node::COPY) move(node.to, node.from, node.bytes);
        if (node.kind == Node::FILL) fill(node.to, node.value, node.bytes);
    }
    return SUCCESS;
}

int launch(const std::string& kernel, void* stream, unsigned programs, unsigned threads, const std::string& note) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (Capture* capture = find_stream(stream)->capture) {
        char size[48];
        snprintf(size, sizeof size, " %u x %u", programs, threads);
        add(capture, {Node::KERNEL, kernel + size + note, nullptr, nullptr, 0, 0});
        return SUCCESS;
    }
    for (Capture* capture : captures)
        if (capture->thread == thread()) say("NOTICE %s runs beside capture %llu, on a stream outside", kernel.c_str(), capture->number);
    return SUCCESS;
}

int copy(void* to, const void* from, size_t bytes, void* stream, bool async, const char* call) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (bytes == 0) return SUCCESS;
    Capture* capture = find_stream(stream)->capture;
    if (!async) {
        waits++;
        if (int error = check_unsafe(call)) return error;
    } else if (capture) {
        if (kind_of(from) == PAGEABLE || kind_of(to) == PAGEABLE) violate(capture, SUCCESS, call, "of pageable memory");
        add(capture, {Node::COPY, call, to, from, bytes, 0});
        return SUCCESS;
    }
    move(to, from, bytes);
    return SUCCESS;
}

int set(void* to, int value, size_t bytes, void* stream) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (Capture* capture = find_stream(stream)->capture) add(capture, {Node::FILL, "fill", to, nullptr, bytes, value});
    else fill(to, value, bytes);
    return SUCCESS;
}

int record_event(void* event, void* stream) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    if (Capture* capture = find_stream(stream)->capture) captured_events[event] = capture;
    else captured_events.erase(event);
    return SUCCESS;
}

int wait_event(void* handle, void* event) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* stream = find_stream(handle);
    auto found = captured_events.find(event);
    if (found == captured_events.end())
        return stream->capture ? violate(stream->capture, CAPTURE_ISOLATION, "a wait", "for an event from outside") : SUCCESS;
    if (is_open(found->second) && !stream->capture) {  // the stream forks off the capture's
        stream->capture = found->second;
        found->second->streams.insert(stream);
    }
    return SUCCESS;
}

int ask_event(void* event, const char* call, bool wait) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    waits += wait;
    auto found = captured_events.find(event);
    if (found != captured_events.end() && is_open(found->second)) return violate(found->second, CAPTURED_EVENT, call, "of a captured event");
    return check_unsafe(call);
}

int synchronize(const char* call) {
    waits++;
    return check_unsafe(call);
}

int synchronize_stream(void* handle, const char* call, bool wait) {
    std::lock_guard<std::recursive_mutex> guard(lock);
    Stream* stream = find_stream(handle);
    waits += wait;
    if (stream->capture) return violate(stream->capture, CAPTURE_UNSUPPORTED, call, "of a stream that is captured");
    return stream == &legacy ? check_unsafe(call) : SUCCESS;
}

__attribute__((destructor)) static void say_counts() {
    if (captured) say("end: %llu captures, %llu replays", captured, replayed);
}
}  // namespace fake

extern "C" int fake_gpu_waits() { return fake::waits; }
