// The counts of a step in one call. Selections write the tally of all layers, and this file adds it up. The function
// `count_tally` in python/sglang_xshare/stage/record/counters.py computes the same result.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>

namespace {

enum Column { STEPS, BEFORE, AFTER, KEPT, ROWS, RESCUED, EXACT, PAGED_BEFORE, PAGED, EXCEEDED, COLUMNS };

int64_t count_set(const uint8_t* flags, const uint8_t* among, const uint8_t* outside, int32_t count) {
  int64_t found = 0;
  for (int32_t i = 0; i < count; i++) found += flags[i] && (!among || among[i]) && !(outside && outside[i]);
  return found;
}

}  // namespace

extern "C" {

// Adds the counts of each layer to its row of `totals` [layers, 10]. Writes the added counts to `counts`, which has the
// same shape. A layer is skipped if vanilla routing activates no expert in it. Such a layer has not selected experts,
// because the model uses experts for every live row. `loaded` is null if no experts are paged. `fits` is null if no
// layer is sure to fit its page slots.
void count_step(
    const uint8_t* active, const uint8_t* vanilla_active, const float* kept_mass, const int64_t* rescued,
    const uint8_t* loaded, const uint8_t* fits, const uint8_t* valid, const uint8_t* exact, double* totals,
    double* counts, int32_t num_slots, int32_t layers, int32_t num_rows, int32_t num_experts) {
  const int64_t live = valid ? count_set(valid, nullptr, nullptr, num_rows) : num_rows;
  const int64_t marked = exact ? count_set(exact, valid, nullptr, num_rows) : 0;
  std::fill_n(counts, static_cast<size_t>(layers) * COLUMNS, 0.0);
  for (int32_t layer = 0; layer < layers; layer++) {
    const uint8_t* before = vanilla_active + static_cast<size_t>(layer) * num_experts;
    const int64_t experts_before = count_set(before, nullptr, nullptr, num_experts);
    if (!experts_before) continue;
    const uint8_t* after = active + static_cast<size_t>(layer) * num_experts;
    const float* kept = kept_mass + static_cast<size_t>(layer) * num_rows;
    double* count = counts + static_cast<size_t>(layer) * COLUMNS;
    count[STEPS] = 1;
    count[BEFORE] = experts_before;
    count[AFTER] = count_set(after, nullptr, nullptr, num_experts);
    count[KEPT] = std::accumulate(kept, kept + num_rows, 0.0);
    count[ROWS] = live;
    count[RESCUED] = rescued[layer];
    count[EXACT] = marked;
    if (loaded) {
      const uint8_t* there = loaded + static_cast<size_t>(layer) * num_experts;
      count[PAGED_BEFORE] = count_set(before, nullptr, there, num_experts);
      count[PAGED] = count_set(after, nullptr, there, num_experts);
      count[EXCEEDED] = fits && fits[layer] && count[AFTER] > num_slots;
    }
    for (int column = 0; column < COLUMNS; column++) {
      totals[static_cast<size_t>(layer) * COLUMNS + column] += count[column];
    }
  }
}
}
