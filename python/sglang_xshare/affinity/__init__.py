"""Expert-affinity dispatch, which sends requests for the same experts to the same replica.

A request's signature is a vector that describes the experts of its tokens. Signatures come from a table (`table.py`),
which the command `calibrate` measures (`calibration.py`). `decision.py` chooses replicas, and does not use SGLang.
"""

from typing import Any

METHOD = "expert_affinity"
"""The value of --load-balance-method that switches on expert-affinity dispatch."""


def is_asked(server_args: Any) -> bool:
    """Return whether the user has set any flag of expert-affinity dispatch."""
    flags = [getattr(server_args, name, None) for name in ("expert_affinity", "expert_affinity_bound")]
    return getattr(server_args, "load_balance_method", None) == METHOD or flags != [None, None]
