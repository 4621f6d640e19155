"""Whether a speculative draft model fits its target, and its drafts the ranks that verify them."""

from __future__ import annotations

from typing import Any

from ..refusal import ExpertPolicyError, refusal
from ..stage.upstream.server import attention_dp_size, routes_own_rows, spell

PADDING = 512
"""Vocabularies of one tokenizer may differ by the rows that fill their embeddings up: Qwen2.5's by 128."""


def check_draft(config: Any, target: Any) -> None:
    """Raise `ExpertPolicyError` where a draft is missing, or its tokens or hidden states are not its target's.

    `config` holds the server's resolved arguments, `target` is the target's text configuration.
    """
    try:
        draft = _read_draft(config)
        if draft is not None:
            _check_fit(draft, target, spell(config.speculative_algorithm))
    except ValueError as error:
        path = str(config.speculative_draft_model_path)
        raise ExpertPolicyError("--speculative-draft-model-path", path, str(error)) from None


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


def _read_draft(config: Any) -> Any:
    """The text configuration of the draft model; None where the server drafts with nothing but the target itself.

    SGLang has read it before, and refused a folder without one. Raises ValueError where a draft is missing.
    """
    path = config.speculative_draft_model_path
    if path is None and config.speculative_algorithm in ("EAGLE3", "STANDALONE"):
        raise ValueError(f"{config.speculative_algorithm} drafts with another model; allowed is the path of one")
    if config.speculative_algorithm is None or path in (None, config.model_path):
        return None
    from sglang.srt.utils.hf_transformers_utils import get_config, get_hf_text_config

    revision = config.speculative_draft_model_revision
    return get_hf_text_config(get_config(path, config.trust_remote_code, revision=revision))


def _check_fit(draft: Any, target: Any, algorithm: str) -> None:
    """Raise ValueError where a draft does not fit its target; both are text configurations.

    All drafts but standalone ones continue the target's hidden states. An EAGLE-3 draft may be of another width itself,
    and then states the target's; its head may rank fewer tokens (`draft_vocab_size`), of the same vocabulary.
    """
    size = getattr(draft, "vocab_size", target.vocab_size)
    if abs(size - target.vocab_size) > PADDING:
        raise ValueError(f"a vocabulary of {size} tokens; allowed is the target's, {target.vocab_size}")
    ranked = getattr(draft, "draft_vocab_size", None) or 0
    if ranked > target.vocab_size:
        raise ValueError(
            f"draft_vocab_size = {ranked}; allowed is at most the target's vocabulary, {target.vocab_size}"
        )
    if algorithm == "STANDALONE":
        return
    name = "target_hidden_size" if getattr(draft, "target_hidden_size", None) else "hidden_size"
    width = getattr(draft, name, target.hidden_size)
    if width != target.hidden_size:
        raise ValueError(f"{name} = {width}; allowed is the target's hidden size, {target.hidden_size}")
