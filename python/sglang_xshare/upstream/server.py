"""What the stage reads of a server: its arguments, its ranks, its release and its device."""

import os
import signal
from typing import Any, NoReturn

from .ranks import is_first_rank
from .release import is_since


def resolved(server_args: Any) -> Any:
    """The resolved arguments: a view over the record from 0.5.20 on, the record itself before."""
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


def model_config(server_args: Any) -> Any:
    """The `ModelConfig` that argument resolution has built and keeps."""
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def declare(server_args: Any, **fields: Any) -> None:
    """Set arguments before SGLang resolves them, in the way that the release has for it."""
    if hasattr(server_args, "resolve_once"):  # from 0.5.20 on
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, "expert_policy", **fields)
        return
    for name, value in fields.items():
        setattr(server_args, name, value)


def show_plan(plan: Any) -> None:
    """Have /server_info tell the plan in force, `internal_states.expert_policy_config`; arguments stay as given."""
    from sglang.srt.runtime_context import get_context

    context = get_context()
    try:
        published = context.server_args
    except ValueError:  # a model that is loaded outside a server
        return
    if published is not None:
        context.override("expert_policy", expert_policy_config=plan)


def spell(value: Any) -> str:
    """An argument as the command line spells it: releases hold some of them as enumerations."""
    return str(getattr(value, "value", value))


def is_switched_on(name: str) -> bool:
    """Whether SGLang takes one of its own environment switches as set."""
    from sglang.srt.environ import envs

    return bool(getattr(envs, name).get())


def pages_experts(config: Any) -> bool:
    """Whether experts are paged into slots; no release before 0.5.23 can."""
    return bool(getattr(config, "enable_paged_experts", False))


def attention_dp_size(config: Any) -> int:
    """Ranks that share out the requests for attention alone, by resolved or given arguments; 1 without data-parallel
    attention. Releases before 0.5.22 call them `dp_size`, as they do whole replicas.
    """
    ranks = getattr(config, "attn_dp_size", 1)
    return max(ranks, config.dp_size) if getattr(config, "enable_dp_attention", False) else ranks


def drafter(config: Any) -> str:
    """Its speculative algorithm as SGLang takes it, in whatever case it was given; "NONE" without one."""
    return spell(getattr(config, "speculative_algorithm", None)).upper()


def draft_width(config: Any) -> int:
    """The most tokens that a request can be given in one step, by resolved arguments: the draft tokens of a chain, or
    of NGRAM, whose tree may be one whatever its steps; the steps of EAGLE's tree and one; 1 without speculation.
    """
    tokens: int = getattr(config, "speculative_num_draft_tokens", None) or 1
    steps: int = getattr(config, "speculative_num_steps", None) or tokens
    breadth = getattr(config, "speculative_eagle_topk", None) or 1
    is_tree = breadth > 1 and drafter(config) != "NGRAM"
    return min(tokens, steps + 1) if is_tree else tokens


def num_schedulers(config: Any) -> int:
    """How many schedulers the server has, one a replica or attention rank. SGLang puts a controller above several."""
    return max(config.dp_size, attention_dp_size(config))


def routes_own_rows(config: Any) -> bool:
    """Whether each rank's router sees its own rows alone, which an all-to-all backend then brings to the experts."""
    return spell(getattr(config, "moe_a2a_backend", None) or "none") != "none"


def rank_mode(config: Any) -> str | None:
    """What has several ranks share out a step's rows, in words; None where every rank has all of them."""
    if attention_dp_size(config) > 1:
        return "data-parallel attention"
    return "an all-to-all backend" if routes_own_rows(config) else None


def is_release(since: str) -> bool:
    """Whether the SGLang that runs has the code of this release, as `is_since` tells."""
    import sglang

    return is_since(sglang.__version__, since)


def is_recorded() -> bool:
    """Whether what runs now is compiled or captured, to be run again."""
    import torch

    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def wait_for_device(device: str) -> None:
    """Return when every step launched so far is done, on whichever stream. A CPU's are."""
    if device != "cpu":
        import torch

        torch.get_device_module(device).synchronize()


def end_server() -> NoReturn:
    """End this rank and its server without a traceback: the first tells the parent, once why is logged."""
    if is_first_rank():
        os.kill(os.getppid(), signal.SIGQUIT)
    raise SystemExit(1)
