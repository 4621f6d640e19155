// Experts that join S after the warm-up (XShare). Budgets add experts for each request, for the batch, up to a share of
// the utility, or for each rank. Loaded experts also join S, because they cost nothing.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "utility.h"

namespace expert_selection {

// Adds the best remaining experts of every rank. LITERAL is XShare's Algorithm 5. FILL fills each rank up to its
// target, and LEVEL fills each rank at least up to the load of the fullest rank.
inline void balance_ranks(const Rows& rows, const Utilities& utility, uint8_t* selected) {
  const Plan& plan = rows.plan;
  const int64_t* home = rows.batch.rank_of_expert;
  const int64_t ranks = 1 + *std::max_element(home, home + plan.num_experts);
  const Mask held = find_held(rows, 0, rows.batch.rows);
  std::vector<std::vector<int32_t>> rest(ranks);
  const std::vector<int32_t> remaining = Ranked(utility, [selected](int j) { return !selected[j]; }).sorted();
  for (const int32_t expert : remaining) rest[home[expert]].push_back(expert);
  std::vector<int64_t> load(ranks, 0), all(ranks, 0);
  for (int j = 0; j < plan.num_experts; j++) {
    load[home[j]] += selected[j] && !held[j];
    all[home[j]] += selected[j];
  }
  if (plan.balance != LITERAL) {
    int64_t target = plan.target_per_rank;
    if (plan.balance == LEVEL) target = std::max(target, *std::max_element(all.begin(), all.end()));
    for (int64_t rank = 0; rank < ranks; rank++) {
      for (int64_t i = 0; i < static_cast<int64_t>(rest[rank].size()) && load[rank] + i < target; i++) {
        selected[rest[rank][i]] = 1;
      }
    }
    return;
  }
  int64_t total = std::accumulate(load.begin(), load.end(), int64_t{0});
  for (size_t round = 0; total < plan.target_per_rank * ranks; round++) {
    int64_t added = 0;
    for (const auto& own : rest) {
      if (round >= own.size()) continue;
      selected[own[round]] = 1;
      added++;
    }
    if (!added) break;
    total += added;
  }
}

// Adds the loaded experts to S. If `slots` limits S, the experts in `sure` come first, then the experts that the batch
// has added, and then the loaded experts. The last two groups are ordered by utility.
inline void join_residents(
    const Plan& plan, const Utilities& utility, const uint8_t* free, int slots, const Mask& sure, uint8_t* selected) {
  const int count = plan.num_experts;
  std::vector<int32_t> standing = Ranked(utility, [&](int j) { return selected[j] && !sure[j]; }).sorted();
  const std::vector<int32_t> joining = Ranked(utility, [&](int j) { return free[j] && !selected[j]; }).sorted();
  standing.insert(standing.end(), joining.begin(), joining.end());
  std::copy(sure.begin(), sure.end(), selected);
  int64_t room = slots ? slots - std::accumulate(sure.begin(), sure.end(), int64_t{0}) : count;
  for (const int32_t expert : standing) {
    if (room-- <= 0) break;
    selected[expert] = 1;
  }
}

inline void add_by_utility(const Rows& rows, uint8_t* selected) {
  const Plan& plan = rows.plan;
  const uint8_t* free = plan.takes_residents ? rows.batch.resident : nullptr;
  if (!free && !plan.add_per_request && !plan.add && plan.mass == 0 && !plan.target_per_rank) return;
  const int count = plan.num_experts, n = rows.batch.rows;
  const auto untaken = [&](const uint8_t* taken) { return [=](int j) { return !taken[j] && !(free && free[j]); }; };
  Utilities utility(count, 0);
  if (plan.add_per_request) {
    for (int begin = 0; begin < n; begin += rows.batch.tokens_per_request) {
      const int end = begin + rows.batch.tokens_per_request;
      Utilities own(count, 0);
      Mask warm(count, 0);
      for (int i = begin; i < end; i++) {
        for (int rank = 0; rank < rows.live(i); rank++) warm[rows.own(i)[rank]] |= rows.kept(i)[rank];
      }
      add_utility(rows, plan.utility, rows.weighs(), begin, end, own);
      Ranked(own, untaken(warm.data())).mark(plan.add_per_request, selected);
      for (int j = 0; j < count; j++) utility[j] += own[j];
    }
  } else {
    add_utility(rows, plan.utility, rows.weighs(), 0, n, utility);
  }
  const Mask sure(selected, selected + count);
  if (plan.add) Ranked(utility, untaken(selected)).mark(plan.add, selected);
  if (plan.mass > 0) {
    int64_t total = 0, had = 0;
    for (int j = 0; j < count; j++) {
      total += utility[j];
      had += selected[j] || (free && free[j]) ? utility[j] : 0;
    }
    const double reach = plan.mass * static_cast<double>(total);
    int32_t room = plan.max_add;
    for (const int32_t expert : Ranked(utility, untaken(selected)).sorted()) {
      if (!(static_cast<double>(had) < reach) || room-- <= 0) break;
      selected[expert] = 1;
      had += utility[expert];
    }
  }
  if (plan.target_per_rank) balance_ranks(rows, utility, selected);
  if (free) join_residents(plan, utility, free, rows.batch.slots, sure, selected);
}

}  // namespace expert_selection
