// The rows of a batch: their choice scores, their own top-k, and the part of the top-k that each row keeps as its
// warm-up.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <vector>

#include "plan.h"
#include "ranking.h"
#include "sums.h"

namespace expert_selection {

constexpr double TINY = 1e-300;  // a divisor that turns 0 / 0 into 0 and changes no other quotient of float32

class Rows {
 public:
  const Plan& plan;
  const Batch& batch;

  Rows(const Plan& plan, const Batch& batch) : plan(plan), batch(batch) {}

  // Ranks the experts of all rows. Returns false if a valid row contains NaN or +inf, because the scores of such a row
  // are wrong.
  bool rank() {
    const int n = batch.rows, k = plan.top_k;
    own_.reset(new int32_t[n * static_cast<size_t>(k)]);
    kept_.reset(new uint8_t[n * static_cast<size_t>(k)]);
    live_.assign(n, 0);
    everyone_.resize(plan.num_experts);
    std::iota(everyone_.begin(), everyone_.end(), 0);
    if (batch.bias || plan.num_groups || batch.halves) {
      choice_.reset(new float[n * static_cast<size_t>(plan.num_experts)]);
    }
    for (int i = 0; i < n; i++) {
      if (!is_valid(i)) continue;
      if (choice_) widen(i);
      if (!is_clean(choice(i))) return false;
      if (choice_) choose(i);
      live_[i] = take_best(choice(i), everyone_.data(), plan.num_experts, k, plan, &own_[i * static_cast<size_t>(k)]);
      keep(i);
    }
    return true;
  }

  bool is_valid(int i) const { return !batch.valid || batch.valid[i]; }
  bool is_exact(int i) const { return batch.exact && batch.exact[i] && is_valid(i); }

  // The scores P and the choice scores C of a row, [N].
  const float* scores(int i) const { return batch.scores + offset(i); }
  const float* choice(int i) const { return choice_ ? choice_.get() + offset(i) : logits(i); }

  // A row's own top-k, best first, and a mask of the experts that the row keeps. Only the first `live` entries are
  // valid.
  const int32_t* own(int i) const { return &own_[i * static_cast<size_t>(plan.top_k)]; }
  const uint8_t* kept(int i) const { return &kept_[i * static_cast<size_t>(plan.top_k)]; }
  int live(int i) const { return live_[i]; }
  const std::vector<int32_t>& everyone() const { return everyone_; }

  // `weighs` returns whether the depth of a row changes its utility. `chance` returns the factor of a row.
  bool weighs() const { return plan.chance && batch.tokens_per_request > 1; }
  float chance(int i) const { return plan.chance[std::clamp(depth(i), 0, DEPTHS - 1)]; }

  // Writes P of a row in multiples of 1 / GRID, [N]. With `weighs`, P is multiplied by the factor for the row's depth.
  // If scores have no upper bound, P is first divided by its sum in the row.
  void to_grid(int i, int64_t* grid, bool weighs = false) const {
    const float* row = scores(i);
    const int count = plan.num_experts;
    const float factor = weighs ? chance(i) : 1.0f;
    if (plan.unbounded) {
      std::vector<double> wide(row, row + count);
      const double total = std::max(sum_row(wide.data(), count), TINY);
      for (int j = 0; j < count; j++) {
        const double share = wide[j] / total;
        grid[j] = weighs ? round_weighed(share, factor) : round_to_even(share * GRID);
      }
      return;
    }
    for (int j = 0; j < count; j++) grid[j] = round_weighed(row[j] == row[j] ? row[j] : 0.0f, factor);
  }

 private:
  int depth(int i) const { return batch.depth ? batch.depth[i] : i % batch.tokens_per_request; }

  size_t offset(int i) const { return i * static_cast<size_t>(plan.num_experts); }

  const float* logits(int i) const { return static_cast<const float*>(batch.logits) + offset(i); }

  bool is_clean(const float* row) const {
    int dirty = 0;
    for (int j = 0; j < plan.num_experts; j++) dirty |= !(row[j] <= std::numeric_limits<float>::max());
    return !dirty;
  }

  // Copies the logits of a row to `choice_` as float.
  void widen(int i) {
    float* out = choice_.get() + offset(i);
    if (!batch.halves) {
      std::copy_n(logits(i), plan.num_experts, out);
      return;
    }
    const uint16_t* halves = static_cast<const uint16_t*>(batch.logits) + offset(i);
    for (int j = 0; j < plan.num_experts; j++) {
      const uint32_t bits = static_cast<uint32_t>(halves[j]) << 16;
      std::memcpy(out + j, &bits, sizeof(bits));
    }
  }

  void choose(int i) {
    const float* score = scores(i);
    float* out = choice_.get() + offset(i);
    for (int j = 0; batch.bias && j < plan.num_experts; j++) {
      const float biased = score[j] + batch.bias[j];
      out[j] = std::isfinite(biased) && out[j] > MINUS_INF ? biased : MINUS_INF;
    }
    if (plan.num_groups) limit_groups(out, plan, batch.bias != nullptr);
  }

  void keep(int i) {
    uint8_t* kept = &kept_[i * static_cast<size_t>(plan.top_k)];
    const int live = live_[i];
    if (is_exact(i)) {
      std::fill_n(kept, live, 1);
      return;
    }
    const int warm_up = !plan.warm_rows || depth(i) < plan.warm_rows ? plan.warm_up : 0;
    for (int rank = 0; rank < live; rank++) kept[rank] = rank < warm_up;
    if (plan.p < 1) {
      std::vector<int64_t> grid(plan.num_experts);
      to_grid(i, grid.data());
      const double reach = plan.p * static_cast<double>(std::accumulate(grid.begin(), grid.end(), int64_t{0}));
      int64_t before = 0;
      for (int rank = 0; rank < live; rank++) {
        if (rank > 0 && !(static_cast<double>(before) < reach)) kept[rank] = 0;
        before += grid[own(i)[rank]];
      }
    }
    if (plan.beta >= 0) {
      const float* score = scores(i);
      for (int rank = 1; rank < live; rank++) {
        const double floor = plan.beta * static_cast<double>(score[own(i)[0]]);
        if (!(static_cast<double>(score[own(i)[rank]]) >= floor)) kept[rank] = 0;
      }
    }
  }

  std::unique_ptr<float[]> choice_;
  std::unique_ptr<int32_t[]> own_;
  std::unique_ptr<uint8_t[]> kept_;
  std::vector<int32_t> live_;
  std::vector<int32_t> everyone_;
};

}  // namespace expert_selection
