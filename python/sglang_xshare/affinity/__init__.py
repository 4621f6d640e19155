"""Expert-affinity dispatch: requests that want the same experts go to the same replica. A signature tells where a
request's experts lie, by a table (`table.py`) that `calibrate` measures (`calibration.py`); `decision.py` decides, and
knows no SGLang.
"""

from typing import Any

METHOD = "expert_affinity"
"""The value of --load-balance-method."""


def is_asked(server_args: Any) -> bool:
    """Whether any flag of expert-affinity dispatch is given."""
    flags = [getattr(server_args, name, None) for name in ("expert_affinity", "expert_affinity_bound")]
    return getattr(server_args, "load_balance_method", None) == METHOD or flags != [None, None]
