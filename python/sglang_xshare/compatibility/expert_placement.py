"""The checks of the flag `--expert-placement`, and the arguments that this flag sets.

With the value `shard` (MoEShard) every rank holds a slice of every expert. With the value `ep` every rank holds some
experts completely. Both placements use SGLang's own layers.
"""

import logging
from typing import Any

from ..refusal import ExpertPolicyError, list_others, spell_flag, spell_value
from ..upstream.configuration import NUM_EXPERTS, find_value
from ..upstream.server import attention_dp_size, declare, drafter, model_config, resolved, routes_own_rows, spell
from .architectures import GATHERED
from .formats import count_block, find_quantization, find_widths, slice_columns

logger = logging.getLogger(__name__)

SHARD, EP = "shard", "ep"
UNGROUPED, OWN_HEADS = frozenset({"NGRAM", "STANDALONE"}), frozenset({"DFLASH", "DSPARK"})
"""Drafters with restrictions under data-parallel attention.

SGLang does not support the drafters in `UNGROUPED`. With the drafters in `OWN_HEADS`, each rank needs the whole LM
head.
"""
# Arguments that SGLang uses only with whole experts. If ranks hold slices of experts, each argument must have the value
# in this table.
WHOLE = {
    "ep_size": 1,
    "moe_dp_size": 1,
    "dwdp_size": 1,
    "enable_eplb": False,
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "elastic_ep_backend": None,
}


def check_division(server_args: Any) -> None:
    """Check --expert-placement before SGLang resolves the arguments.

    Raises `ExpertPolicyError` if the flag's value is wrong, or if another flag contradicts the placement.
    """
    placement = server_args.expert_placement
    if placement not in (SHARD, EP):
        raise ExpertPolicyError("--expert-placement", placement, f"must be {SHARD} or {EP}")
    ranks = server_args.tp_size
    if ranks < 2:
        raise _refusal(placement, "tp_size", ranks, "there is only one rank for the experts; must be at least 2")
    flags: dict[str, Any] = {"moe_dp_size": 1} if placement == EP else WHOLE
    reason = "the flag divides experts in another way" if placement == EP else "the flag needs whole experts"
    for name, given, allowed in list_others(server_args, flags):
        raise _refusal(placement, name, spell_value(given), f"{reason}; must be {spell_value(allowed)}")
    if placement == EP:
        if server_args.ep_size not in (1, ranks):
            raise _refusal(placement, "ep_size", server_args.ep_size, f"must be {ranks}, the number of ranks")
        return
    if routes_own_rows(server_args):
        reason = "the backend brings rows to whole experts; must be none"
        raise _refusal(placement, "moe_a2a_backend", spell(server_args.moe_a2a_backend), reason)
    if _divides_attention(server_args):
        _check_attention(server_args, ranks)


def set_placement(server_args: Any) -> None:
    """Set the arguments with which SGLang places the experts. `check_division` must have accepted the arguments."""
    ranks = server_args.tp_size
    if server_args.expert_placement == EP:
        declare(server_args, ep_size=ranks)
    elif _divides_attention(server_args):
        if hasattr(server_args, "attn_dp_size"):
            declare(server_args, attn_dp_size=ranks)
        else:
            declare(server_args, dp_size=ranks, enable_dp_attention=True)


def check_placement(server_args: Any) -> None:
    """Log the placement of the experts. Raises `ExpertPolicyError` if the ranks cannot divide the model."""
    placement = server_args.expert_placement
    config, model = resolved(server_args), model_config(server_args)
    experts = find_value(model.hf_text_config, NUM_EXPERTS)
    path, ranks = server_args.model_path, config.tp_size
    if not experts:
        reason = f"{model.hf_config.architectures[0]} is a dense model; must be a Mixture-of-Experts model"
        raise _refusal(placement, "model_path", path, reason)
    if config.ep_size != (ranks if placement == EP else 1):
        raise _refusal(placement, "tp_size", ranks, f"SGLang resolves --ep-size to {config.ep_size} with these flags")
    if placement == EP:
        replicas = config.ep_num_redundant_experts
        _check_divides(placement, ranks, experts, f"experts of {path}", replicas)
        share = f"{(experts + replicas) // ranks} whole experts"
    else:
        share = f"a slice of every expert, {_describe_slices(ranks, model, path)}"
    groups = attention_dp_size(config)
    heads = getattr(model.hf_text_config, "num_attention_heads", None)
    if heads is not None:
        _check_divides(placement, ranks // groups, heads, f"attention heads of {path}")
    attention = f"data-parallel in {groups} groups of ranks" if groups > 1 else "tensor-parallel"
    logger.warning("expert placement %s: each of %d ranks holds %s; attention %s", placement, ranks, share, attention)


def _check_attention(server_args: Any, ranks: int) -> None:
    """Raise `ExpertPolicyError` for flags that SGLang does not support with data-parallel attention.

    SGLang's own error would name a flag that the user did not set.
    """
    beside = f"by SGLang with the data-parallel attention that {SHARD} sets"
    instead = f"--tp {ranks} alone, the same slices with tensor-parallel attention"
    context = getattr(server_args, "attn_cp_size", 1)
    if context > 1:
        raise _refusal(SHARD, "attn_cp_size", context, f"not supported {beside}; must be 1, or use {instead}")
    algorithm = drafter(server_args)
    needed = "" if algorithm in UNGROUPED else " without --enable-dp-lm-head"
    if algorithm in UNGROUPED or (algorithm in OWN_HEADS and not server_args.enable_dp_lm_head):
        reason = f"not supported {beside}{needed}; use {instead}"
        raise _refusal(SHARD, "speculative_algorithm", algorithm, reason)


def _check_divides(placement: str, ranks: int, count: Any, what: str, more: int = 0) -> None:
    if type(count) is int and (count + more) % ranks:
        total = f"{count}" + (f" + {more}" if more else "")
        reason = f"the ranks must divide the {total} {what}"
        raise ExpertPolicyError("--expert-placement", f"{placement} with {ranks} ranks", reason)


def _describe_slices(ranks: int, model: Any, path: str) -> str:
    """Return the number of an expert's columns on each rank, as text.

    Raises `ExpertPolicyError` if the ranks cannot divide the columns, or if a slice would end within a quantized block.
    """
    quantization = find_quantization(model)
    block = count_block(quantization)
    # For gpt-oss with MXFP4 weights, SGLang rounds each slice up to whole blocks.
    pads = "GptOssForCausalLM" in model.hf_config.architectures and quantization.get("quant_method") == "mxfp4"
    shares = []
    for width in find_widths(model.hf_text_config):
        _check_divides(SHARD, ranks, width, f"columns of an expert of {path}")
        share = slice_columns(width, ranks, block, pads)
        if share is None:
            wrong = f"slices of {width // ranks} columns end within the blocks of {block} that weights are quantized by"
            if pads:
                wrong = f"{width} columns in blocks of {block} leave a rank without any"
            fitting = [str(count) for count in range(2, width + 1) if slice_columns(width, count, block, pads)]
            allowed = f"{', '.join(fitting)} ranks, or {EP}" if fitting else EP
            raise ExpertPolicyError("--expert-placement", f"{SHARD} with {ranks} ranks", f"{wrong}; must be {allowed}")
        least, most = share
        shares.append(f"{most if least == most else f'{least} to {most}'} of its {width}")
    return f"{' or '.join(shares)} columns" if shares else "of a width that the model's configuration lacks"


def _divides_attention(server_args: Any) -> bool:
    """Return whether the placement turns on data-parallel attention.

    This is the case if SGLang supports data-parallel attention for the model and the device, and no other flag divides
    attention.
    """
    import torch
    from transformers import PretrainedConfig

    if not server_args.dp_size == attention_dp_size(server_args) == 1:
        return False
    device = server_args.device or ("gpu" if torch.accelerator.is_available() else "cpu")
    if device == "cpu":
        return False
    try:  # SGLang has not read config.json yet
        config, _ = PretrainedConfig.get_config_dict(server_args.model_path, revision=server_args.revision)
    except (OSError, ValueError):
        return False
    return next(iter(config.get("architectures") or ()), None) in GATHERED


def _refusal(placement: str, name: str, value: Any, reason: str) -> ExpertPolicyError:
    return ExpertPolicyError("--expert-placement", f"{placement} with {spell_flag(name)} {value}", reason)
