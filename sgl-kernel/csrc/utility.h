// The utility of every expert. Utilities are integers, so their sum is exact in any order.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "rows.h"

namespace expert_selection {

using Mask = std::vector<uint8_t>;
using Utilities = std::vector<int64_t>;

// Adds the utility of rows [begin, end). With `weighs`, the depth of a row changes its utility. Exact rows have no
// utility.
inline void add_utility(const Rows& rows, int32_t kind, bool weighs, int begin, int end, Utilities& utility) {
  const int k = rows.plan.top_k;
  Utilities grid(kind == FULL ? rows.plan.num_experts : 0);
  std::vector<double> own(k);
  for (int i = begin; i < end; i++) {
    if (!rows.is_valid(i) || rows.is_exact(i)) continue;
    if (kind == FULL) {
      rows.to_grid(i, grid.data(), weighs);
      for (int j = 0; j < rows.plan.num_experts; j++) utility[j] += grid[j];
      continue;
    }
    const int live = rows.live(i);
    for (int rank = 0; rank < k; rank++) own[rank] = rank < live ? rows.scores(i)[rows.own(i)[rank]] : 0.0;
    const double mass = std::max(sum_row(own.data(), k), TINY);
    for (int rank = 0; rank < live; rank++) {
      const double part = own[rank] / mass, share = kind == SQUARED ? part * part : part;
      utility[rows.own(i)[rank]] += weighs ? round_weighed(share, rows.chance(i)) : round_to_even(share * GRID);
    }
  }
}

// Experts ranked by utility. The lower index wins a tie. A key contains both utility and index, because one number
// sorts fastest.
class Ranked {
 public:
  template <typename Takes>
  Ranked(const Utilities& utility, const Takes& takes) {
    for (int j = 0; j < static_cast<int>(utility.size()); j++) {
      if (utility[j] > 0 && takes(j)) keys_.push_back((utility[j] << INDEX_BITS) | (MAX_INDEX - j));
    }
  }

  // Marks the `count` best experts.
  void mark(int64_t count, uint8_t* selected) {
    if (count < static_cast<int64_t>(keys_.size())) {
      std::nth_element(keys_.begin(), keys_.begin() + std::max<int64_t>(count, 0), keys_.end(), std::greater<>());
      keys_.resize(std::max<int64_t>(count, 0));
    }
    for (const int64_t key : keys_) selected[index(key)] = 1;
  }

  // Returns all experts, best first.
  std::vector<int32_t> sorted() {
    std::sort(keys_.begin(), keys_.end(), std::greater<>());
    std::vector<int32_t> experts;
    for (const int64_t key : keys_) experts.push_back(index(key));
    return experts;
  }

 private:
  static constexpr int INDEX_BITS = 10;
  static constexpr int64_t MAX_INDEX = (1 << INDEX_BITS) - 1;
  static int32_t index(int64_t key) { return static_cast<int32_t>(MAX_INDEX - (key & MAX_INDEX)); }

  std::vector<int64_t> keys_;
};

// Returns the top-k of the exact rows in [begin, end). No budget counts these experts.
inline Mask find_held(const Rows& rows, int begin, int end) {
  Mask held(rows.plan.num_experts, 0);
  if (!rows.batch.exact) return held;
  for (int i = begin; i < end; i++) {
    for (int rank = 0; rows.is_exact(i) && rank < rows.live(i); rank++) held[rows.own(i)[rank]] = 1;
  }
  return held;
}

}  // namespace expert_selection
