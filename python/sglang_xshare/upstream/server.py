"""An SGLang server: its arguments, its ranks, its release and its device."""

import os
import signal
from typing import Any, NoReturn

from .ranks import is_first_rank
from .release import is_since


def resolved(server_args: Any) -> Any:
    """Return the resolved arguments.

    From 0.5.20 on, they are a view of the given arguments. Before 0.5.20, they are the given arguments themselves.
    """
    try:
        from sglang.srt.arg_groups.overrides import resolving_view
    except ImportError:
        return server_args
    return resolving_view(server_args)


def model_config(server_args: Any) -> Any:
    """Return the `ModelConfig` that SGLang builds when it resolves the arguments."""
    if hasattr(server_args, "get_model_config"):
        return server_args.get_model_config()
    from sglang.srt.arg_groups.overrides import model_config_of

    return model_config_of(server_args)


def declare(server_args: Any, **fields: Any) -> None:
    """Set arguments before SGLang resolves them. Use SGLang's own function if the release has one."""
    if hasattr(server_args, "resolve_once"):  # from 0.5.20 on
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, "expert_policy", **fields)
        return
    for name, value in fields.items():
        setattr(server_args, name, value)


def show_plan(plan: Any) -> None:
    """Show the active policy in /server_info, as `internal_states.expert_policy_config`.

    The server's arguments do not change.
    """
    from sglang.srt.runtime_context import get_context

    context = get_context()
    try:
        published = context.server_args
    except ValueError:  # a model that is loaded outside a server
        return
    if published is not None:
        context.override("expert_policy", expert_policy_config=plan)


def spell(value: Any) -> str:
    """Return an argument as written on the command line. In some releases, the argument is an enumeration."""
    return str(getattr(value, "value", value))


def is_switched_on(name: str) -> bool:
    """Return whether SGLang's environment switch `name` is on."""
    from sglang.srt.environ import envs

    return bool(getattr(envs, name).get())


def pages_experts(config: Any) -> bool:
    """Return whether the server pages experts into slots. Releases before 0.5.23 do not."""
    return bool(getattr(config, "enable_paged_experts", False))


def attention_dp_size(config: Any) -> int:
    """Return the number of data-parallel attention ranks, or 1 without data-parallel attention.

    The arguments may be resolved or not. Before 0.5.22, the number is in `dp_size`. But without
    data-parallel attention, `dp_size` is the number of whole replicas.
    """
    ranks = getattr(config, "attn_dp_size", 1)
    return max(ranks, config.dp_size) if getattr(config, "enable_dp_attention", False) else ranks


def is_speculative(config: Any) -> bool:
    """Return whether the server speculates. The arguments may be resolved or not.

    With `enable_return_aux_hidden_states`, `speculative_algorithm` only names the hidden states that SGLang returns.
    """
    named = getattr(config, "speculative_algorithm", None) is not None
    return named and not getattr(config, "enable_return_aux_hidden_states", False)


def drafter(config: Any) -> str:
    """Return the speculative algorithm in upper case, or "NONE" if the server does not speculate."""
    return spell(config.speculative_algorithm).upper() if is_speculative(config) else "NONE"


def draft_tokens(config: Any) -> int:
    """Return the number of draft tokens of a request, or 1 if the server does not speculate."""
    tokens: int | None = getattr(config, "speculative_num_draft_tokens", None)
    return tokens if tokens and is_speculative(config) else 1


def draft_width(config: Any) -> int:
    """Return the most tokens that a request can get in one step. `config` contains resolved arguments.

    For a chain, this is the number of draft tokens. It is the same for NGRAM, because its tree may be a chain. For
    EAGLE's tree, this is at most the number of steps plus one. Without speculation, it is 1.
    """
    tokens = draft_tokens(config)
    steps: int = getattr(config, "speculative_num_steps", None) or tokens
    breadth = getattr(config, "speculative_eagle_topk", None) or 1
    is_tree = breadth > 1 and drafter(config) != "NGRAM"
    return min(tokens, steps + 1) if is_tree else tokens


def num_schedulers(config: Any) -> int:
    """Return the number of schedulers, which is one for each replica or attention rank."""
    return max(config.dp_size, attention_dp_size(config))


def routes_own_rows(config: Any) -> bool:
    """Return whether each rank routes only its own rows. An all-to-all backend then sends the rows to the experts."""
    return spell(getattr(config, "moe_a2a_backend", None) or "none") != "none"


def rank_mode(config: Any) -> str | None:
    """Return the name of the feature that divides a step's rows among ranks, or None if every rank has all rows."""
    if attention_dp_size(config) > 1:
        return "data-parallel attention"
    return "an all-to-all backend" if routes_own_rows(config) else None


def is_release(since: str) -> bool:
    """Return whether the running SGLang has the code of release `since` (see `is_since`)."""
    import sglang

    return is_since(sglang.__version__, since)


def is_recorded() -> bool:
    """Return whether the current code is being compiled, or captured as a CUDA graph."""
    import torch

    return torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def wait_for_device(device: str) -> None:
    """Wait until all launched steps are done, on every stream. On a CPU, there is nothing to wait for."""
    if device != "cpu":
        import torch

        torch.get_device_module(device).synchronize()


def end_server() -> NoReturn:
    """End this rank and its server without a traceback. The caller must log the reason.

    The first rank sends a signal to the server.
    """
    if is_first_rank():
        os.kill(os.getppid(), signal.SIGQUIT)
    raise SystemExit(1)
