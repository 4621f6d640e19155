"""What a server does whose ranks have selected differently: it goes back to vanilla, or ends."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from .upstream.ranks import is_first_rank
from .upstream.server import end_server

if TYPE_CHECKING:
    from .stage import Stage

logger = logging.getLogger(__name__)


def stop_disagreeing(stage: Stage, which: list[int]) -> None:
    """Ranks have selected otherwise than the first, and every rank knows it after the same forward: switch to vanilla
    from the next on, or end the server, as its flag decides and where its graphs cannot follow. Where the model routes
    by itself there is nothing to go back to.
    """
    assert stage.agreement is not None
    reason = (
        f"ranks {which} have selected other experts than the first: their policies, router logits or placements differ, "
        "and the sum of their outputs was wrong"
    )
    schedule = stage.plans.schedule
    selects = schedule is not None and not schedule.observed
    then = "the server ends" if stage.stops else "vanilla from the next step on" if selects else "no policy is in force"
    if is_first_rank():
        logger.error("Expert policy: %s; %s", reason, then)
    if stage.stops:
        end_server()
    if not selects:
        return
    stage.agreement.fallbacks += 1
    try:
        stage.switch(None, stage.reporter)
    except ValueError as error:
        if is_first_rank():
            logger.error("Expert policy: the server ends, it cannot be switched to vanilla: %s", error)
        end_server()
    stage.disagreement = reason
