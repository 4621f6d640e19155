// The experts of every row and their weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "rows.h"

namespace expert_selection {

// Adds the first choice of every row that has no expert of its top-k in S. Returns the number of these rows.
inline int64_t rescue_rows(const Rows& rows, uint8_t* selected) {
  std::vector<int32_t> lost;
  for (int i = 0; i < rows.batch.rows; i++) {
    bool inside = !rows.live(i);
    for (int rank = 0; rank < rows.live(i); rank++) inside |= selected[rows.own(i)[rank]];
    if (!inside) lost.push_back(rows.own(i)[0]);
  }
  for (const int32_t expert : lost) selected[expert] = 1;
  return static_cast<int64_t>(lost.size());
}

class Cover {
 public:
  Cover(const Rows& rows, const uint8_t* selected) : rows_(rows), plan_(rows.plan), selected_(selected) {
    for (int j = 0; j < plan_.num_experts; j++) {
      if (selected[j]) members_.push_back(j);
    }
    const int most = std::max(std::min(plan_.kmax, plan_.num_experts), plan_.top_k);
    width_ = plan_.coverage != SUBSTITUTE || rows.batch.exact ? most : std::min(plan_.kmax, plan_.num_experts);
    experts_.resize(most);
    scores_.resize(most);
    own_.resize(plan_.top_k);
    reach_.resize(plan_.max_rank ? std::min(plan_.max_rank, plan_.num_experts) : 0);
  }

  // Finds the experts of a row, best first, and returns their number. `experts` returns the experts.
  int find(int i) {
    if (!rows_.live(i)) return 0;
    if (plan_.coverage == SUBSTITUTE && !rows_.is_exact(i)) return substitute(i);
    const bool all = rows_.is_exact(i);
    int found = 0;
    for (int rank = 0; rank < rows_.live(i); rank++) {
      const int32_t expert = rows_.own(i)[rank];
      const bool mine = plan_.coverage == TRUNCATE ? selected_[expert] : rows_.kept(i)[rank];
      if (all || mine) experts_[found++] = expert;
    }
    return found;
  }

  const int32_t* experts() const { return experts_.data(); }

  // Writes the weights of the row's `found` experts. Returns the kept mass of the row: the sum of the scores of these
  // experts, divided by the sum over the row's own top-k.
  float weigh(int i, int found, float* weights) {
    const float* score = rows_.scores(i);
    std::fill(scores_.begin(), scores_.end(), 0.0f);
    std::fill(own_.begin(), own_.end(), 0.0f);
    for (int slot = 0; slot < found; slot++) scores_[slot] = score[experts_[slot]];
    for (int rank = 0; rank < rows_.live(i); rank++) own_[rank] = score[rows_.own(i)[rank]];
    const float kept = sum_row(scores_.data(), width_) / sum_row(own_.data(), plan_.top_k);
    const bool finite = kept <= std::numeric_limits<float>::max();
    if (plan_.renormalize) divide(i, found);
    for (int slot = 0; slot < found; slot++) {
      float weight = scores_[slot];
      if (rows_.batch.expert_scale) weight *= rows_.batch.expert_scale[experts_[slot]];
      weights[slot] = plan_.scaling == 1.0 ? weight : weight * static_cast<float>(plan_.scaling);
    }
    return rows_.is_exact(i) || !finite ? 1.0f : kept;
  }

 private:
  int substitute(int i) {
    const float* choice = rows_.choice(i);
    const int count = std::min(plan_.kmax, plan_.num_experts);
    const int limit = static_cast<int>(reach_.size());
    if (!limit || limit == plan_.num_experts) {
      return take_best(choice, members_.data(), static_cast<int>(members_.size()), count, plan_, experts_.data());
    }
    const auto& everyone = rows_.everyone();
    const int reached = find_best(choice, everyone.data(), plan_.num_experts, limit, reach_.data());
    usable_.clear();
    for (int place = 0; place < reached; place++) {
      if (selected_[reach_[place]]) usable_.push_back(reach_[place]);
    }
    for (int rank = 0; rank < rows_.live(i); rank++) {
      const int32_t expert = rows_.own(i)[rank];
      if (rows_.kept(i)[rank] && std::find(usable_.begin(), usable_.end(), expert) == usable_.end()) {
        usable_.push_back(expert);
      }
    }
    std::sort(usable_.begin(), usable_.end());
    return take_best(choice, usable_.data(), static_cast<int>(usable_.size()), count, plan_, experts_.data());
  }

  // Divides the scores by one of three numbers: their sum, the sum over the row's own top-k, or a geometric mean of
  // both. If the divisor is 0, all scores count as 1.
  void divide(int i, int found) {
    float whole = find_divisor(i);
    if (whole == 0) {
      std::fill_n(scores_.begin(), found, 1.0f);
      std::fill_n(own_.begin(), rows_.live(i), 1.0f);
      whole = find_divisor(i);
    }
    if (whole == 0) return;  // the row has no expert
    for (int slot = 0; slot < found; slot++) scores_[slot] /= whole;
  }

  float find_divisor(int i) const {
    const double power = rows_.is_exact(i) ? 1.0 : plan_.own_power;
    if (power == 1) return sum_row(own_.data(), plan_.top_k);
    const float chosen = sum_row(scores_.data(), width_);
    if (power == 0) return chosen;
    const double own = sum_row(own_.data(), plan_.top_k);
    return static_cast<float>(std::pow(static_cast<double>(chosen), 1 - power) * std::pow(own, power));
  }

  const Rows& rows_;
  const Plan& plan_;
  const uint8_t* selected_;
  // The number of terms in a sum over chosen experts, including empty slots. This number decides the bits of the sum.
  int width_;
  std::vector<int32_t> members_, experts_, reach_, usable_;
  std::vector<float> scores_, own_;
};

}  // namespace expert_selection
