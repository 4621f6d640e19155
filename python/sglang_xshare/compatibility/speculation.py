"""Drafters whose verification the stage is served with, and what it is not served with beside them."""

import os
from typing import Any

from ..refusal import refusal
from ..upstream.server import attention_dp_size, is_release, routes_own_rows, spell

DRAFTERS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
NEWER = ("DFLASH", "DSPARK", "FROZEN_KV_MTP", "UNO")
"""Those that have been executed with a policy on `SINCE` alone, and on one rank of attention."""
SINCE = "0.5.23"
# How DSpark verifies: in two of its three modes every request has as many rows, whatever is accepted of them.
MODE, UNIFORM = "SGLANG_RAGGED_VERIFY_MODE", ("static", "cap-accept")


def check_speculation(config: Any) -> None:
    """Raise `ExpertPolicyError` for speculation whose verification cannot be served with a policy."""
    algorithm = spell(config.speculative_algorithm)
    drafters = (*DRAFTERS, *NEWER) if is_release(SINCE) else DRAFTERS
    if algorithm not in drafters:
        raise refusal("--speculative-algorithm", config.speculative_algorithm, f"allowed is {', '.join(drafters)}")
    if algorithm in NEWER:
        _check_newer(config, algorithm)
    _check_trees(config, algorithm)


def _check_newer(config: Any, algorithm: str) -> None:
    if attention_dp_size(config) > 1 or routes_own_rows(config):
        mode = "data-parallel attention" if attention_dp_size(config) > 1 else "an all-to-all backend"
        reason = f"it has not been executed with {mode}; allowed with that is EAGLE, EAGLE3, NEXTN"
        raise refusal("--speculative-algorithm", algorithm, reason)
    verified = os.environ.get(MODE, UNIFORM[0])
    if algorithm == "DSPARK" and verified not in UNIFORM:
        reason = "its requests differ in rows, which a policy groups by request"
        raise refusal(MODE, verified, f"{reason}; allowed is {', '.join(UNIFORM)} or unset")
    breadth = getattr(config, "speculative_eagle_topk", None)
    if algorithm == "UNO" and breadth is not None and breadth > 1:
        raise refusal("--speculative-eagle-topk", breadth, "UNO's trees have not been executed; allowed is 1")
    tokens = getattr(config, "speculative_num_draft_tokens", None)
    if algorithm == "UNO" and tokens == 1:
        reason = "of one token UNO drafts nothing, and replays one graph for both of its forwards"
        raise refusal("--speculative-num-draft-tokens", tokens, f"{reason}; allowed is at least 2")


def _check_trees(config: Any, algorithm: str) -> None:
    """Refuse to return routed experts where drafts are trees: SGLang moves the keys and values of the path that it has
    accepted to its slots, and leaves the experts of other drafts there.
    """
    flag = "speculative_ngram_max_bfs_breadth" if algorithm == "NGRAM" else "speculative_eagle_topk"
    breadth = getattr(config, flag, None)
    if getattr(config, "enable_return_routed_experts", False) and breadth is not None and breadth > 1:
        reason = "--enable-return-routed-experts would return those of drafts that were not accepted; allowed is 1"
        raise refusal(f"--{flag.replace('_', '-')}", breadth, reason)
