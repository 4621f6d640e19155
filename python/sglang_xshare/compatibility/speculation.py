"""Drafters whose verification the stage is served with, and what it is not served with beside them."""

import os
from typing import Any

from ..refusal import refusal
from ..upstream.server import drafter, is_release, rank_mode

DRAFTERS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
NEWER = ("DFLASH", "DSPARK", "FROZEN_KV_MTP", "UNO")
"""Those that have been executed with a policy on `SINCE` alone, and on one rank of attention."""
SINCE = "0.5.23"
# How DSpark verifies: in two of its three modes every request has as many rows, whatever is accepted of them.
MODE, UNIFORM = "SGLANG_RAGGED_VERIFY_MODE", ("static", "cap-accept")
UNRECORDED = ("DSPARK", "NGRAM", "UNO")
"""Whose verification leaves what SGLang has recorded of its experts behind, UNO's for one token a step."""
UNPREPARED = ("FROZEN_KV_MTP", "UNO")
"""Who cannot go on with what a prefill server hands over: SGLang 0.5.23 fails at the first step."""


def check_speculation(config: Any) -> None:
    """Raise `ExpertPolicyError` for speculation whose verification cannot be served with a policy."""
    algorithm = drafter(config)
    drafters = (*DRAFTERS, *NEWER) if is_release(SINCE) else DRAFTERS
    if algorithm not in drafters:
        raise refusal("--speculative-algorithm", algorithm, f"allowed is {', '.join(drafters)}{_explain(algorithm)}")
    if algorithm in NEWER:
        _check_newer(config, algorithm)
    if getattr(config, "enable_return_routed_experts", False):
        _check_recorded(config, algorithm, [one for one in drafters if one not in UNRECORDED])


def _check_newer(config: Any, algorithm: str) -> None:
    mode = rank_mode(config)
    if mode is not None:
        reason = f"it has not been executed with {mode}; allowed with that is EAGLE, EAGLE3, NEXTN{_explain(algorithm)}"
        raise refusal("--speculative-algorithm", algorithm, reason)
    if algorithm in UNPREPARED and config.disaggregation_mode == "decode":
        reason = f"SGLang hands {algorithm} no draft of what was prefilled elsewhere; allowed is null"
        raise refusal("--disaggregation-mode", "decode", reason)
    verified = os.environ.get(MODE, UNIFORM[0])
    if algorithm == "DSPARK" and verified not in UNIFORM:
        raise refusal(MODE, verified, f"a policy groups rows by request; allowed is {', '.join(UNIFORM)} or unset")
    breadth = getattr(config, "speculative_eagle_topk", None)
    if algorithm in UNPREPARED and (breadth or 1) > 1:
        raise refusal("--speculative-eagle-topk", breadth, f"{algorithm}'s trees have not been executed; allowed is 1")
    tokens = getattr(config, "speculative_num_draft_tokens", None)
    if algorithm == "UNO" and tokens == 1:
        reason = "of one token UNO drafts nothing, and replays one graph for both of its forwards"
        raise refusal("--speculative-num-draft-tokens", tokens, f"{reason}; allowed is at least 2")


def _check_recorded(config: Any, algorithm: str, allowed: list[str]) -> None:
    """Refuse to return routed experts that SGLang has not: it drops what it has recorded, or, of a tree of drafts,
    moves the keys and values of the accepted path to its slots and leaves the experts of other drafts there.
    """
    if algorithm in UNRECORDED:
        reason = "--enable-return-routed-experts would return others' experts, as SGLang drops what it has recorded"
        raise refusal("--speculative-algorithm", algorithm, f"{reason}; allowed is {', '.join(allowed)}")
    breadth = getattr(config, "speculative_eagle_topk", None)
    if (breadth or 1) > 1:
        reason = "--enable-return-routed-experts would return those of drafts that were not accepted; allowed is 1"
        raise refusal("--speculative-eagle-topk", breadth, reason)


def _explain(algorithm: str) -> str:
    """What the user may have given in its place."""
    return " of other models: this draft turns NEXTN and EAGLE into it" if algorithm == "FROZEN_KV_MTP" else ""
