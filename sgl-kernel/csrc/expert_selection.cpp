// Selection on a CPU in one call: from the router logits and scores to the ids, weights and counts of a layer. The code
// follows python/sglang_xshare/selection/reference.py. The torch backend returns the same ids, weights and counts.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <new>

#include "budgets.h"
#include "cover.h"
#include "plan.h"
#include "rows.h"
#include "votes.h"

namespace expert_selection {
namespace {

void select_set(const Rows& rows, uint8_t* selected) {
  std::fill_n(selected, rows.plan.num_experts, 0);
  for (int i = 0; i < rows.batch.rows; i++) {
    for (int rank = 0; rank < rows.live(i); rank++) selected[rows.own(i)[rank]] |= rows.kept(i)[rank];
  }
  if (rows.plan.ranks_experts) {
    add_ranked(rows, selected);
  } else if (rows.plan.confidence > 0) {
    follow_voters(rows, selected);
  } else {
    add_by_utility(rows, selected);
  }
}

// Returns the expert that fills empty slots, which must be active already. This is the last active expert that is in S
// and in some row's own top-k. If there is none, it is the last active expert. If no expert is active, the result is 0.
int32_t find_filler(const Answer& answer, int num_experts) {
  int32_t filler = 0;
  for (int32_t j = num_experts - 1; j >= 0; j--) {
    if (!answer.active[j]) continue;
    if (answer.selected[j] && answer.vanilla_active[j]) return j;
    filler = std::max(filler, j);
  }
  return filler;
}

// Returns whether `width` is the number of columns of the plan and large enough for every row's experts. A plan that
// was packed for batches without exact rows may be too narrow. The reason is that an exact row needs top-k columns,
// which may be more than `kmax`.
bool fits_width(const Plan& plan, const Batch& batch, int width) {
  const int own = batch.exact || plan.coverage != SUBSTITUTE ? plan.top_k : 0;
  const int most = std::max(std::min(plan.kmax, plan.num_experts), own);
  return most <= plan.columns && plan.columns + plan.shared == width;
}

void cover_rows(const Rows& rows, const Answer& answer) {
  const Plan& plan = rows.plan;
  const int width = plan.columns + plan.shared;
  std::fill_n(answer.active, plan.num_experts, 0);
  std::fill_n(answer.vanilla_active, plan.num_experts, 0);
  Cover cover(rows, answer.selected);
  for (int i = 0; i < rows.batch.rows; i++) {
    int32_t* ids = answer.ids + i * static_cast<size_t>(width);
    float* weights = answer.weights + i * static_cast<size_t>(width);
    const int found = cover.find(i);
    std::copy_n(cover.experts(), found, ids);
    std::fill(ids + found, ids + plan.columns, -1);
    std::fill(weights + found, weights + plan.columns, 0.0f);
    const float kept = cover.weigh(i, found, weights);
    answer.kept_mass[i] = rows.is_valid(i) ? kept : 0.0f;
    for (int slot = 0; slot < found; slot++) answer.active[ids[slot]] = 1;
    for (int rank = 0; rank < rows.live(i); rank++) answer.vanilla_active[rows.own(i)[rank]] = 1;
    for (int expert = 0; expert < plan.shared; expert++) {
      ids[plan.columns + expert] = plan.num_experts + expert;
      weights[plan.columns + expert] = static_cast<float>(plan.shared_weight);
    }
  }
  if (!plan.fill) return;
  const int32_t filler = find_filler(answer, plan.num_experts);
  for (int i = 0; i < rows.batch.rows; i++) {
    int32_t* ids = answer.ids + i * static_cast<size_t>(width);
    std::replace(ids, ids + plan.columns, -1, ids[0] < 0 ? filler : ids[0]);
  }
}

}  // namespace
}  // namespace expert_selection

extern "C" {

// Returns a `Status`. NOT_CLEAN means that a valid row of the logits contains NaN or +inf. WRONG_WIDTH means that ids
// and weights [rows, width] do not have the columns that the batch needs. In both cases the call has written nothing.
int32_t select_experts(
    const expert_selection::Plan* plan, const void* logits, const float* scores, const uint8_t* valid,
    const uint8_t* exact, const uint8_t* resident, const float* bias, const float* expert_scale,
    const int64_t* rank_of_expert, const int32_t* depth, int32_t halves, int32_t rows, int32_t tokens_per_request,
    int32_t slots, int32_t width, int32_t* ids, float* weights, uint8_t* selected, uint8_t* active, uint8_t* vanilla_active,
    float* kept_mass, int64_t* rescued) {
  using namespace expert_selection;
  const Batch batch = {
      logits, scores, valid, exact, resident, bias, expert_scale, rank_of_expert, depth, halves, rows,
      tokens_per_request, slots};
  const Answer answer = {ids, weights, selected, active, vanilla_active, kept_mass, rescued};
  if (!fits_width(*plan, batch, width)) return WRONG_WIDTH;
  try {
    Rows ranked(*plan, batch);
    if (!ranked.rank()) return NOT_CLEAN;
    select_set(ranked, answer.selected);
    *answer.rescued = plan->rescue ? rescue_rows(ranked, answer.selected) : 0;
    cover_rows(ranked, answer);
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
  return DONE;
}

// Returns the size of a `Plan`. The caller compares it with the size of its own structure.
int64_t size_of_plan() { return sizeof(expert_selection::Plan); }
}
