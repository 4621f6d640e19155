"""The flags of expert-affinity dispatch, parsed and checked."""

import math
import os
from pathlib import Path
from typing import Any

from ..refusal import ExpertPolicyError, spell_flag
from ..upstream.server import attention_dp_size, is_switched_on, model_config, resolved, spell
from . import METHOD
from .controller import Dispatcher
from .decision import DEFAULT, Affinity
from .table import Table, describe_model, load_table

FLAG = f"--load-balance-method {METHOD}"
# Servers with these flags have no tokenizer manager, the SGLang process that reports which requests have ended.
SERVERS = ("grpc_mode", "smg_grpc_mode", "grpc_port")
RUST = "SGLANG_RUST_SERVER"
NO_SIGN_OF_END = "this server does not report which requests have ended"


def read_affinity(server_args: Any) -> tuple[Table, float]:
    """Return the table and the bound that the flags set. Raises `ExpertPolicyError` if a flag is wrong or missing."""
    file = getattr(server_args, "expert_affinity", None)
    bound = getattr(server_args, "expert_affinity_bound", None)
    if getattr(server_args, "load_balance_method", None) != METHOD:
        flag, value = ("--expert-affinity-bound", bound) if file is None else ("--expert-affinity", file)
        raise ExpertPolicyError(flag, value, f"must be used with {FLAG}")
    if file is None:
        made = "must be used with --expert-affinity FILE, which `sglang-xshare calibrate` writes"
        raise ExpertPolicyError("--load-balance-method", METHOD, made)
    if bound is not None and not (math.isfinite(bound) and bound >= 1):
        allowed = f"must be a number of at least 1, such as {DEFAULT}"
        raise ExpertPolicyError("--expert-affinity-bound", bound, allowed)
    try:
        table = load_table(Path(file))
    except ValueError as error:
        allowed = "must be a file of `sglang-xshare calibrate`"
        raise ExpertPolicyError("--expert-affinity", file, f"{allowed} ({error})") from None
    return table, DEFAULT if bound is None else bound


def check_affinity(server_args: Any, table: Table) -> None:
    """Raise `ExpertPolicyError` if the server or the table does not fit expert-affinity dispatch.

    The server must have several replicas that share no MoE layers, on one node and without disaggregation. It must
    report which requests have ended. The table must be of the server's model.
    """
    config = resolved(server_args)
    shared = (
        "data-parallel attention must be off, because its ranks share all MoE layers, whichever rank runs a request"
    )
    mode = config.disaggregation_mode
    refused = [
        ("data-parallel attention", attention_dp_size(config) > 1, shared),
        (f"--dp-size {config.dp_size}", config.dp_size < 2, "--dp-size must be at least 2"),
        (f"--nnodes {config.nnodes}", config.nnodes > 1, "--nnodes must be 1"),
        (f"--disaggregation-mode {mode}", spell(mode) != "null", "--disaggregation-mode must be null"),
    ]
    for name in SERVERS:
        value = getattr(config, name, None)
        flag = spell_flag(name) + ("" if value is True else f" {value}")
        refused.append((flag, bool(value), f"requests must arrive by HTTP, because {NO_SIGN_OF_END}"))
    told = f"{RUST}={os.environ.get(RUST, 'on')}"
    refused.append((told, is_switched_on(RUST), f"{RUST} must be unset, because {NO_SIGN_OF_END}"))
    for other, applies, reason in refused:
        if applies:
            raise ExpertPolicyError("--load-balance-method", f"{METHOD} with {other}", reason)
    _check_table(server_args, table)


def make_dispatcher(controller: Any) -> Dispatcher:
    """Return the dispatcher for a data-parallel controller. The dispatcher also receives reports of ended requests."""
    table, bound = read_affinity(controller.server_args)
    # Without a prefix cache, a repeated prompt costs the same on all replicas. Its previous replica may have been
    # chosen only because the others were full.
    caches = not resolved(controller.server_args).disable_radix_cache
    affinity = Affinity(table, controller.server_args.dp_size, bound, caches)
    return Dispatcher(controller, affinity, controller.server_args.enable_metrics)


def _check_table(server_args: Any, table: Table) -> None:
    """Raise `ExpertPolicyError` for a table of another model or tokenizer.

    A property is compared only if both the table and the model's folder have it.
    """
    path = server_args.model_path
    found = describe_model(model_config(server_args).hf_text_config, Path(path))
    for what, of_table in table.origin.items():
        if of_table and found[what] and of_table != found[what]:
            said = f"its {what} is {of_table[:24]}, that of {path} {found[what][:24]}"
            allowed = "must be a table of this model, by `sglang-xshare calibrate`"
            raise ExpertPolicyError("--expert-affinity", server_args.expert_affinity, f"{allowed} ({said})")
