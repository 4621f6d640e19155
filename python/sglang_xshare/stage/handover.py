"""What selection hands to upstream's fused MoE runner beside the ids: how few experts they use, and their alignment.

The patch of `_prepare_fused_moe_run` calls `align` in place of `moe_align_block_size`. An offer is found by the ids'
storage and shape, and is taken once. The offer holds the ids, so that no other tensor can have their storage meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from ..types import Alignment


@dataclass(frozen=True)
class Offer:
    """What is known of `ids` [n, columns], whose experts lie between 0 and `num_experts`, that included not.

    The ids have at most `most` different experts; None trims nothing. `untaken` has the numbers of rows whose alignment
    no runner has taken: taking `alignment` discards the number.
    """

    ids: torch.Tensor
    num_experts: int
    most: int | None = None
    alignment: Alignment | None = None
    untaken: set[int] = field(default_factory=set)


@dataclass
class Levers:
    """What layers under a policy hand over: see `configure`."""

    trim: bool = False
    prebuilt: bool = True


levers = Levers()
taken: Counter[str] = Counter()
"""How often the runner took something, by the host's count: eager steps and captures, no replays. Keys are "prebuilt",
"trimmed", and "upstream" for an offer of which nothing was used.
"""
_offer: Offer | None = None


def configure(trim: bool | None = None, prebuilt: bool | None = None) -> None:
    """Choose what layers hand over from their next step on; None leaves a choice as it is.

    `prebuilt`: the selection kernel's alignment. `trim`: the launch covers only blocks that the plan's `max_active` can
    fill. A CUDA graph that was captured with `trim` keeps its bound: a switch to a plan, or to vanilla, with a larger
    bound is refused, and so are exact requests. Hence `trim` is off unless a server's process calls this first.
    """
    levers.trim = levers.trim if trim is None else trim
    levers.prebuilt = levers.prebuilt if prebuilt is None else prebuilt


def refuse_exact() -> str | None:
    """Return why a server can have no exact requests, which use experts that no plan bounds; None where it can."""
    if not levers.trim:
        return None
    return "custom_params.expert_policy = 'exact': the server trims its launches to the plan's bound of active experts"


def offer(made: Offer) -> None:
    """Offer what is known of some ids to the runner that is called with them next."""
    global _offer
    _offer = made


def withdraw() -> None:
    """Forget an offer that no runner has taken, and release its tensors."""
    global _offer
    _offer = None


def align(
    upstream: Callable[..., tuple[torch.Tensor, ...]], ids: torch.Tensor, block_size: int, num_experts: int
) -> tuple[torch.Tensor, ...]:
    """Return (sorted_token_ids, expert_ids, num_tokens_post_padded) of `ids` [n, columns], as `upstream` does.

    An alignment that was offered takes the place of the call. Slices of the offered bound's length make the runner
    launch programs for those blocks alone. Without an offer of exactly these ids upstream's answer is returned.
    """
    global _offer
    made = _offer
    if made is None or not _is_of(made, ids, num_experts):
        return upstream(ids, block_size, num_experts)
    # Here, because a server without a policy loads this module and makes no offer.
    from ..selection.alignment import BLOCK, count_blocks

    _offer = None
    found: tuple[torch.Tensor, ...] | None = made.alignment if block_size == BLOCK else None
    if found is not None:
        made.untaken.discard(len(ids))
        taken["prebuilt"] += 1
    elif made.most is None:
        taken["upstream"] += 1
        return upstream(ids, block_size, num_experts)
    else:
        found = upstream(ids, block_size, num_experts)
    if made.most is not None:
        taken["trimmed"] += 1
    blocks = count_blocks(num_experts if made.most is None else made.most, ids.numel(), block_size)
    pairs, experts, total = found
    return pairs[: blocks * block_size], experts[:blocks], total


def _is_of(made: Offer, ids: torch.Tensor, num_experts: int) -> bool:
    """Return whether the runner was called with the ids of an offer, for the experts that the offer is about."""
    return (
        ids.data_ptr() == made.ids.data_ptr()
        and ids.shape == made.ids.shape
        and ids.stride() == made.ids.stride()
        and ids.dtype == made.ids.dtype
        and num_experts == made.num_experts
    )
