"""Support for all-to-all expert parallelism.

Each rank routes its own rows, and a backend sends the rows to the ranks that hold their experts. A row with fewer
experts than top-k has empty slots, which contain the expert id -1. A backend is supported if its code in SGLang 0.5.23
drops empty slots. No backend has been tested with a policy on GPUs.
"""

from typing import Any

from ..policies.schedule import Schedule
from ..refusal import refusal
from ..stage.gather import Ranks
from ..upstream.ranks import find_rank
from ..upstream.server import model_config, resolved, routes_own_rows, spell
from .architectures import ALL_TO_ALL, DISPATCHED
from .moe_model import MoeModel, read_model

BACKENDS = ("none", "deepep", "mooncake", "nixl")
"""Supported values of --moe-a2a-backend.

SGLang itself passes the expert id -1 to the kernels of these backends, for padding rows and for "invalid topk slots"
(token_dispatcher/deepep.py). The MoE runner receives only slots that the backend has dispatched, so it never receives
an empty slot.
"""
_UNKNOWN = "the treatment of an empty slot is unknown"
_ONE_KERNEL = f"one kernel dispatches, computes and combines, and {_UNKNOWN}"
REASONS = {
    "megamoe": _ONE_KERNEL,
    "flashinfer_megamoe": _ONE_KERNEL,
    "ascend_fuseep": _ONE_KERNEL,
    "pplx": "the backend reads the -1 of an empty slot as expert 4294967295",
    "deepep_v2": f"the backend passes on as many experts a row as the router has, and {_UNKNOWN}",
}
"""The reasons why these backends are not supported. For other unsupported backends the reason is `_UNKNOWN`."""


def check_backend(config: Any) -> None:
    """Raise `ExpertPolicyError` if the all-to-all backend is not supported. `config` may be unresolved."""
    backend = spell(config.moe_a2a_backend or "none")
    if backend not in BACKENDS:
        reason = f"{REASONS.get(backend, _UNKNOWN)}; must be one of {', '.join(BACKENDS)}"
        raise refusal("--moe-a2a-backend", backend, reason)


def check_model(model: MoeModel, config: Any) -> None:
    """Raise `ExpertPolicyError` if the model is not known to support the server's all-to-all backend."""
    backend = spell(config.moe_a2a_backend or "none")
    served = ALL_TO_ALL if backend == "deepep" else DISPATCHED
    if routes_own_rows(config) and model.architecture not in served:
        reason = f"{model.architecture} is not known to have all-to-all expert parallelism by {backend}"
        raise refusal("--model-path", model.path, f"{reason}; must be one of {', '.join(sorted(served))}")


def read_ranks(model_runner: Any, schedule: Schedule | None) -> Ranks | None:
    """Return the server's ranks if each rank routes only its own rows.

    Return None if the router of each rank gets the rows of all ranks.
    """
    config = resolved(model_runner.server_args)
    if not routes_own_rows(config):
        return None
    rank, size, share = find_rank()
    num_experts = read_model(model_config(model_runner.server_args), config.model_path).num_experts
    return Ranks(rank, size, share, num_experts, schedule is not None and schedule.rows == "batch")
