// Sums and rounding with the same bits as torch, so weights and utilities are equal to those of the torch backend.
#pragma once

#include <cstdint>

namespace expert_selection {

constexpr double GRID = 1 << 20;

// Rounds 0 <= x <= 2^21 to the nearest integer, halves to even. A number plus SHIFT has no bits left for a fraction.
inline int32_t round_to_even(float x) {
  constexpr float SHIFT = 12582912.0f;  // 1.5 * 2^23
  return static_cast<int32_t>((x + SHIFT) - SHIFT);
}

inline int64_t round_to_even(double x) {
  constexpr double SHIFT = 6755399441055744.0;  // 1.5 * 2^52
  return static_cast<int64_t>((x + SHIFT) - SHIFT);
}

// Returns the product of a score and a chance in multiples of 1 / GRID.
template <typename T>
int64_t round_weighed(T score, float chance) {
  return round_to_even(static_cast<float>(score) * chance * static_cast<float>(GRID));
}

// Adds `count` numbers at a distance of `stride`, in four interleaved sums.
template <typename T>
T sum_interleaved(const T* values, int count, int stride) {
  T sums[4] = {};
  int i = 0;
  for (; i + 4 <= count; i += 4) {
    for (int chain = 0; chain < 4; chain++) sums[chain] += values[(i + chain) * stride];
  }
  for (; i < count; i++) sums[0] += values[i * stride];
  return ((sums[0] + sums[1]) + sums[2]) + sums[3];
}

// Adds a row in the order of torch on x86. The elements that do not fill a 32-byte vector come first, then each lane of
// the vectors.
template <typename T>
T sum_row(const T* values, int count) {
  constexpr int LANES = 32 / sizeof(T);
  if (count < LANES) return sum_interleaved(values, count, 1);
  const int vectors = count / LANES;
  T total = 0;
  for (int i = vectors * LANES; i < count; i++) total += values[i];
  for (int lane = 0; lane < LANES; lane++) total += sum_interleaved(values + lane, vectors, LANES);
  return total;
}

}  // namespace expert_selection
