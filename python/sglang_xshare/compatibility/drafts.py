"""Checks for a server that chooses the draft depth by tokens per second."""

import json
import os
from typing import Any

from ..depth import SINCE, THROUGHPUT, UPSTREAM, is_on
from ..policies.keys import shorten
from ..refusal import ExpertPolicyError
from ..upstream.server import drafter, is_release, is_switched_on

FLAG = "--expert-policy-draft-depth"
CONFIG = "--speculative-adaptive-config"
SKIPS = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"
ADAPTIVE = ("EAGLE", "EAGLE3", "NEXTN")
"""Algorithms for which SGLang can adapt the draft depth (see `adaptive_unsupported_reason`). NEXTN means EAGLE."""


def is_asked(server_args: Any) -> bool:
    """Return whether the user has set --expert-policy-draft-depth, or a policy turns on `THROUGHPUT` by default."""
    return getattr(server_args, "expert_policy_draft_depth", None) is not None or is_on(server_args)


def check_depth(server_args: Any) -> None:
    """Raise `ExpertPolicyError` if the unresolved flags do not allow the server to choose a draft depth."""
    asked = getattr(server_args, "expert_policy_draft_depth", None)
    if asked not in (None, THROUGHPUT, UPSTREAM):
        raise ExpertPolicyError(FLAG, asked, f"must be {THROUGHPUT} or {UPSTREAM}")
    if not server_args.speculative_adaptive:
        raise ExpertPolicyError(FLAG, asked, "must be used with --speculative-adaptive")
    if asked == UPSTREAM:
        return
    if not is_release(SINCE):
        raise ExpertPolicyError(FLAG, asked, f"needs SGLang {SINCE} or newer; must be {UPSTREAM} on this release")
    breadth = server_args.speculative_eagle_topk
    if asked is None and ((breadth or 1) > 1 or drafter(server_args) not in ADAPTIVE):
        return  # SGLang turns --speculative-adaptive off, so the default has no effect
    if (breadth or 1) > 1:
        raise ExpertPolicyError("--speculative-eagle-topk", breadth, f"must be 1 with {FLAG} {asked}")
    _check_candidates(server_args.speculative_adaptive_config, server_args.speculative_num_steps)


def check_adapts(server_args: Any, config: Any) -> None:
    """Raise `ExpertPolicyError` if the user requests an adaptive draft depth, but SGLang does not adapt the depth.

    `config` contains the resolved arguments. If the server chooses the depth by tokens per second, also raise the error
    if the environment variable `SKIPS` is on. The draft model would then skip the tokens of steps without drafts, and
    later drafts would become worse.
    """
    if is_on(config) and is_switched_on(SKIPS):
        raise ExpertPolicyError(
            SKIPS, os.environ.get(SKIPS, "on"), f"must be unset with {FLAG} {THROUGHPUT}, which stops drafts"
        )
    asked = getattr(server_args, "expert_policy_draft_depth", None)
    if asked != THROUGHPUT or config.speculative_adaptive:
        return
    from sglang.srt.speculative.adaptive_spec_params import adaptive_unsupported_reason

    reason = adaptive_unsupported_reason(server_args) or "this server does not speculate"
    raise ExpertPolicyError(FLAG, asked, f"SGLang does not adapt the drafts of this server: {reason}")


def _check_candidates(file: str | None, steps: int | None) -> None:
    """Raise `ExpertPolicyError` if the candidate depths are wrong, or do not include the initial depth.

    `file` contains the candidates, and `steps` is the initial depth.
    """
    from sglang.srt.speculative.adaptive_spec_params import resolve_candidate_steps_from_config

    try:
        candidates = resolve_candidate_steps_from_config(file)
    except OSError as error:
        raise ExpertPolicyError(CONFIG, file, f"must be a JSON file ({error.strerror})") from None
    except json.JSONDecodeError as error:
        raise ExpertPolicyError(CONFIG, file, f"must be a JSON file ({error})") from None
    except (AttributeError, KeyError, TypeError, RecursionError):
        # SGLang reads the content of the file without validating its format.
        raise ExpertPolicyError(CONFIG, file, 'must be an object like {"1": {"candidate_steps": [1, 3]}}') from None
    except ValueError as error:
        raise ExpertPolicyError(CONFIG, file, shorten(" ".join(str(error).split()))) from None
    if not any(candidates):
        raise ExpertPolicyError(CONFIG, file, "must have a candidate above 0")
    if steps is not None and steps not in candidates:
        source = f"{CONFIG} {file}" if file else f"SGLang without {CONFIG}"
        reason = f"must be one of {shorten(', '.join(map(str, candidates)))} (the candidates of {source})"
        raise ExpertPolicyError("--speculative-num-steps", steps, reason)
