"""Expert-affinity dispatch: requests for the same experts go to the same replica.

A request's signature describes the experts that its tokens use. Signatures come from a table (`table.py`), which the
command `calibrate` measures (`calibration.py`). `decision.py` chooses replicas, independently of SGLang.
"""

from typing import Any

METHOD = "expert_affinity"
"""The value of --load-balance-method."""


def is_asked(server_args: Any) -> bool:
    """Return whether any flag of expert-affinity dispatch is given."""
    flags = [getattr(server_args, name, None) for name in ("expert_affinity", "expert_affinity_bound")]
    return getattr(server_args, "load_balance_method", None) == METHOD or flags != [None, None]
