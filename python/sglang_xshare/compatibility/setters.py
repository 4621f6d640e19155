"""What is set of a server's arguments, once those that were given are checked and before SGLang resolves them."""

from .backend import choose_runner
from .expert_placement import set_placement
from .start import PLACEMENT, STAGE, Start


def set_arguments(start: Start) -> None:
    """Set the flags that make a placement, and the MoE runner where SGLang's own choice would be none that the policy
    is served with. A placement that was refused is not set.
    """
    if start.asks(PLACEMENT) and "placement" not in start.refused:
        set_placement(start.server_args)
    if start.asks(STAGE):
        choose_runner(start.server_args, start.arguments)
