"""Whether the draft tokens of a speculation fill the rows that ranks are padded to."""

from __future__ import annotations

from typing import Any

from ..refusal import refusal
from ..upstream.server import attention_dp_size, routes_own_rows


def check_draft_tokens(config: Any) -> None:
    """Raise `ExpertPolicyError` where a request's draft tokens would not fill the rows that ranks of data-parallel
    attention, or of an all-to-all backend, are padded to.
    """
    shares, tokens = attention_dp_size(config), config.speculative_num_draft_tokens or 0
    ranks = config.tp_size // shares
    is_padded = shares > 1 or routes_own_rows(config)
    if is_padded and config.speculative_algorithm is not None and tokens % ranks:
        reason = f"SGLang pads a rank's rows to its {ranks} tensor-parallel ranks, which must not split a request"
        raise refusal("--speculative-num-draft-tokens", tokens, f"{reason}; allowed is a multiple of {ranks}")
