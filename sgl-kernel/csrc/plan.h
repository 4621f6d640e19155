// The numbers of a plan and a router, and the addresses of a batch's tensors. The module
// python/sglang_xshare/selection/cpu_call fills the fields, and policies/plan.py describes them.
#pragma once

#include <cstdint>

namespace expert_selection {

enum Utility : int32_t { TOPK, FULL, SQUARED };
enum Balance : int32_t { LITERAL, FILL, LEVEL };
enum Ranking : int32_t { ROUTER, VOTES, STATIC };
enum Coverage : int32_t { SUBSTITUTE, TRUNCATE, OWN };

// The result of a call. The caller is not C++, so the call must not throw an exception.
enum Status : int32_t { DONE, NOT_CLEAN, OUT_OF_MEMORY, WRONG_WIDTH };

constexpr int DEPTHS = 256;  // must equal DEPTHS of selection/scores.py

// A plan for one router. An unused number is 0 and an unused share is 1, unless a comment gives another value.
struct Plan {
  const int64_t* order;  // [num_experts]: the experts of the static ranking, best first
  const float* chance;   // [DEPTHS]: the factor of the utility at each draft depth; null if all factors are 1

  double p;
  double beta;        // below 0: skip no expert
  double mass;        // 0: unused
  double confidence;  // 0: unused
  double own_power;
  double scaling;
  double shared_weight;

  int32_t num_experts;
  int32_t top_k;
  int32_t unbounded;  // scores have no upper bound, so each score is divided by the row's sum before it is added
  int32_t renormalize;
  int32_t num_groups;
  int32_t topk_group;
  int32_t quota_groups;

  int32_t warm_up;
  int32_t warm_rows;  // the number of depths with a warm-up; 0: all depths
  int32_t utility;
  int32_t add_per_request;
  int32_t add;
  int32_t max_add;  // the largest number of experts that `mass` adds; num_experts: no limit
  int32_t target_per_rank;
  int32_t balance;
  int32_t ranks_experts;
  int32_t ranking;
  int32_t by_request;
  int32_t budget;
  int32_t drop;  // below 0: unused, and `budget` applies
  int32_t max_voters;
  int32_t min_votes;
  int32_t takes_residents;

  int32_t coverage;
  int32_t kmax;
  int32_t max_rank;  // 0: no limit
  int32_t rescue;

  int32_t columns;  // for chosen experts; the `shared` columns come after them
  int32_t shared;
  int32_t fill;  // fill empty slots with an active expert
};

// The input of one call: n rows and N experts. A pointer is null if the batch or the router does not have the tensor.
struct Batch {
  // [n, N] float, or bfloat16 if `halves` is set; a valid row contains neither NaN nor +inf.
  const void* logits;
  const float* scores;  // [n, N]: P
  const uint8_t* valid;
  const uint8_t* exact;
  const uint8_t* resident;       // [N]
  const float* bias;             // [N]
  const float* expert_scale;     // [N]
  const int64_t* rank_of_expert; // [N]
  const int32_t* depth;          // [n]; null: a row's depth is its position in its request
  int32_t halves;  // the logits are bfloat16
  int32_t rows;
  int32_t tokens_per_request;
  int32_t slots;  // 0: no limit
};

// The output of one call, which writes every element.
struct Answer {
  int32_t* ids;     // [n, columns + shared]
  float* weights;   // [n, columns + shared]
  uint8_t* selected;  // [N], as are the next two
  uint8_t* active;
  uint8_t* vanilla_active;
  float* kept_mass;  // [n]
  int64_t* rescued;
};

}  // namespace expert_selection
