"""What a server does whose ranks have selected differently: it goes back to vanilla, or ends."""

import logging
from collections.abc import Callable

from ..upstream.ranks import is_first_rank
from ..upstream.server import end_server
from .evidence.agreement import Agreement
from .plans import Plans

logger = logging.getLogger(__name__)


def stop_disagreeing(
    agreement: Agreement, which: list[int], plans: Plans, stops: bool, go_back: Callable[[], None]
) -> str:
    """Ranks `which` have selected otherwise than the first, and every rank knows it after the same forward: `go_back`
    to vanilla from the next on, or end the server, where it `stops` then or its graphs cannot follow. Where the model
    routes by itself there is nothing to go back to. Returns what is wrong, in one line.
    """
    reason = (
        f"ranks {which} have selected other experts than the first: their policies, router logits or placements "
        "differ, and the sum of their outputs was wrong"
    )
    selects = plans.schedule is not None and not plans.schedule.observed
    then = "the server ends" if stops else "vanilla from the next step on" if selects else "no policy is in force"
    if is_first_rank():
        logger.error("Expert policy: %s; %s", reason, then)
    if stops:
        end_server()
    if selects:
        agreement.fallbacks += 1
        try:
            go_back()
        except ValueError as error:
            if is_first_rank():
                logger.error("Expert policy: the server ends, it cannot be switched to vanilla: %s", error)
            end_server()
    return reason
