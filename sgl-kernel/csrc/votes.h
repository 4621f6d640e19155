// Experts that join S as the best of a ranking (MoE-Spec, Lynx 4.2), or by the votes of the most confident rows (Lynx
// 4.3).
#pragma once

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "utility.h"

namespace expert_selection {

// Marks the experts with the most votes of the rows [begin, end). A row votes for each expert of its top-k.
inline void mark_by_votes(const Rows& rows, int begin, int end, const Mask& held, uint8_t* selected) {
  const Plan& plan = rows.plan;
  std::vector<int64_t> votes(plan.num_experts, 0);
  Utilities utility(plan.num_experts, 0);
  add_utility(rows, FULL, false, begin, end, utility);
  for (int i = begin; i < end; i++) {
    for (int rank = 0; !rows.is_exact(i) && rank < rows.live(i); rank++) votes[rows.own(i)[rank]]++;
  }
  std::vector<std::tuple<int64_t, int64_t, int32_t>> ranked;
  int64_t voted = 0;
  for (int32_t j = 0; j < plan.num_experts; j++) {
    if (held[j] || !(votes[j] || utility[j])) continue;
    ranked.emplace_back(-votes[j], -utility[j], j);
    voted += votes[j] > 0;
  }
  const int64_t retain = std::max<int64_t>(plan.drop < 0 ? plan.budget : voted - plan.drop, plan.top_k);
  std::sort(ranked.begin(), ranked.end());
  for (int64_t i = 0; i < std::min<int64_t>(retain, ranked.size()); i++) selected[std::get<2>(ranked[i])] = 1;
}

// Adds the best experts of a ranking, for the batch or for each request.
inline void add_ranked(const Rows& rows, uint8_t* selected) {
  const Plan& plan = rows.plan;
  const int n = rows.batch.rows, size = plan.by_request ? rows.batch.tokens_per_request : n;
  for (int begin = 0; begin < n || (begin == 0 && !plan.by_request); begin += std::max(size, 1)) {
    const int end = begin + size;
    const Mask held = find_held(rows, begin, end);
    if (plan.ranking == VOTES) {
      mark_by_votes(rows, begin, end, held, selected);
    } else if (plan.ranking == STATIC) {
      int64_t room = plan.budget;
      for (int place = 0; place < plan.num_experts && room > 0; place++) {
        if (held[plan.order[place]]) continue;
        selected[plan.order[place]] = 1;
        room--;
      }
    } else {
      Utilities utility(plan.num_experts, 0);
      add_utility(rows, plan.utility, rows.weighs(), begin, end, utility);
      Ranked(utility, [&held](int j) { return !held[j]; }).mark(plan.budget, selected);
    }
  }
}

// Returns the rows that vote, most confident first. If no row is confident enough, returns the most confident row.
inline std::vector<int> find_voters(const Rows& rows) {
  const Plan& plan = rows.plan;
  std::vector<std::tuple<double, int>> sure, others;
  Utilities grid(plan.num_experts);
  for (int i = 0; i < rows.batch.rows; i++) {
    if (!rows.is_valid(i) || rows.is_exact(i)) continue;
    rows.to_grid(i, grid.data());
    const double best = static_cast<double>(*std::max_element(grid.begin(), grid.end()));
    const double total = static_cast<double>(std::accumulate(grid.begin(), grid.end(), int64_t{0}));
    const bool confident = best >= plan.confidence * total && total > 0;
    (confident ? sure : others).emplace_back(-best / std::max(total, TINY), i);
  }
  auto& found = sure.empty() ? others : sure;
  const size_t count = std::min<size_t>(found.size(), sure.empty() ? 1 : plan.max_voters);
  std::partial_sort(found.begin(), found.begin() + count, found.end());
  std::vector<int> voters;
  for (size_t i = 0; i < count; i++) voters.push_back(std::get<1>(found[i]));
  return voters;
}

// Adds the experts with enough votes, and the first choice of every voter. If fewer than top-k experts are then
// selected, adds the best other experts.
inline void follow_voters(const Rows& rows, uint8_t* selected) {
  const Plan& plan = rows.plan;
  std::vector<int32_t> votes(plan.num_experts, 0);
  for (const int i : find_voters(rows)) {
    for (int rank = 0; rank < rows.live(i); rank++) votes[rows.own(i)[rank]]++;
    if (rows.live(i)) selected[rows.own(i)[0]] = 1;
  }
  int64_t held = 0;
  for (int j = 0; j < plan.num_experts; j++) {
    selected[j] |= votes[j] >= plan.min_votes;
    held += selected[j];
  }
  if (held >= plan.top_k) return;
  Utilities utility(plan.num_experts, 0);
  add_utility(rows, FULL, false, 0, rows.batch.rows, utility);
  Ranked(utility, [selected](int j) { return !selected[j]; }).mark(plan.top_k - held, selected);
}

}  // namespace expert_selection
