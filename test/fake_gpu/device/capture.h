// What memory.cpp and capture.cpp share.
#pragma once
#include <cstddef>
#include <mutex>

namespace fake {
extern std::recursive_mutex lock;
void move(void* to, const void* from, size_t bytes);
void fill(void* to, int value, size_t bytes);
}  // namespace fake
