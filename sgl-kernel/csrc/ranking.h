// The ranking of a row's experts by choice score, highest first. The lower expert wins a tie. An expert with -inf is
// never chosen.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "plan.h"

namespace expert_selection {

constexpr float MINUS_INF = -std::numeric_limits<float>::infinity();
constexpr int MANY = 48;  // from this count on, sorting is faster than insertion

// Writes the `count` best experts of `experts` to `best`, best first, and returns their number. `experts` must be
// ascending.
inline int find_best(const float* choice, const int32_t* experts, int num_experts, int count, int32_t* best) {
  if (count <= 0) return 0;
  if (count >= MANY) {
    std::vector<int32_t> alive;
    for (int i = 0; i < num_experts; i++) {
      if (choice[experts[i]] > MINUS_INF) alive.push_back(experts[i]);
    }
    count = std::min<int>(count, alive.size());
    std::partial_sort(alive.begin(), alive.begin() + count, alive.end(), [choice](int32_t a, int32_t b) {
      return choice[a] > choice[b] || (choice[a] == choice[b] && a < b);
    });
    std::copy_n(alive.begin(), count, best);
    return count;
  }
  float scores[MANY];
  float last = MINUS_INF;
  int found = 0;
  for (int i = 0; i < num_experts; i++) {
    const int32_t expert = experts[i];
    const float score = choice[expert];
    if (!(score > last)) continue;
    int place = found < count ? found++ : count - 1;
    for (; place > 0 && scores[place - 1] < score; place--) {
      scores[place] = scores[place - 1];
      best[place] = best[place - 1];
    }
    scores[place] = score;
    best[place] = expert;
    if (found == count) last = scores[count - 1];
  }
  return found;
}

// Does the same as `find_best` for a router that takes the same number of experts from each group.
inline int find_best_of_groups(
    const float* choice, const int32_t* experts, int num_experts, int count, const Plan& plan, int32_t* best) {
  const int size = plan.num_experts / plan.quota_groups, share = count / plan.quota_groups;
  int found = 0;
  for (int begin = 0; begin < num_experts;) {
    const int group = experts[begin] / size;
    int end = begin;
    while (end < num_experts && experts[end] / size == group) end++;
    found += find_best(choice, experts + begin, end - begin, share, best + found);
    begin = end;
  }
  std::sort(best, best + found, [choice](int32_t a, int32_t b) {
    return choice[a] > choice[b] || (choice[a] == choice[b] && a < b);
  });
  return found;
}

// Writes the `count` best experts by the router's rule. The arguments and the result are those of `find_best`.
inline int take_best(
    const float* choice, const int32_t* experts, int num_experts, int count, const Plan& plan, int32_t* best) {
  if (plan.quota_groups) return find_best_of_groups(choice, experts, num_experts, count, plan, best);
  return find_best(choice, experts, num_experts, count, best);
}

// Sets `choice` to -inf outside the best groups of the row. The score of a group is its best choice score. If the
// router has a bias, it is the sum of the two best choice scores.
inline void limit_groups(float* choice, const Plan& plan, bool biased) {
  const int size = plan.num_experts / plan.num_groups;
  std::vector<float> scores(plan.num_groups);
  std::vector<int32_t> order(plan.num_groups);
  for (int group = 0; group < plan.num_groups; group++) {
    float first = MINUS_INF, second = MINUS_INF;
    for (int j = group * size; j < (group + 1) * size; j++) {
      if (choice[j] > first) {
        second = first;
        first = choice[j];
      } else {
        second = std::max(second, choice[j]);
      }
    }
    scores[group] = biased && size > 1 ? first + second : first;
    order[group] = group;
  }
  std::stable_sort(order.begin(), order.end(), [&scores](int32_t a, int32_t b) { return scores[a] > scores[b]; });
  for (int i = plan.topk_group; i < plan.num_groups; i++) {
    std::fill_n(choice + order[i] * size, size, MINUS_INF);
  }
}

}  // namespace expert_selection
