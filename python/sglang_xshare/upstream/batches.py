"""The batch sizes that a server's steps can have, and their possible padding rows."""

import sys
from dataclasses import dataclass
from typing import Any

from .server import attention_dp_size, draft_tokens, routes_own_rows, spell


@dataclass(frozen=True)
class Batches:
    """The batch sizes that a server's steps can have, in router rows.

    `captured` contains the captured batch sizes in ascending order. Larger batches run without padding. They are
    multiples of `unit`, the number of draft tokens of a request. They have at most `most` rows, or any number if `most`
    is None. With `always_pad`, any step may have padding rows, because ranks pad their rows to equal numbers.
    """

    captured: tuple[int, ...] = ()
    unit: int = 1
    most: int | None = None
    always_pad: bool = False

    def __str__(self) -> str:
        parts = [f"captured: {', '.join(map(str, self.captured))}"] if self.captured else []
        parts += [f"in multiples of {self.unit}"] if self.unit > 1 else []
        parts += [f"at most {self.most}"] if self.most is not None else []
        return "; ".join(parts) or "any number"

    def meet(self, first: int, last: int | None) -> bool:
        """Return whether a step can have `first` to `last` rows. If `last` is None, there is no upper limit."""
        last = sys.maxsize if last is None else last
        if self.most is not None:
            last = min(last, next((rows for rows in self.captured if rows >= self.most), self.most))
        eager = max(first, self.captured[-1] + 1 if self.captured else 1)
        return any(first <= rows <= last for rows in self.captured) or last // self.unit * self.unit >= eager

    def may_pad(self, rows: int) -> bool:
        """Return whether a step with this number of rows may contain padding rows."""
        smaller = rows - self.unit
        return self.always_pad or (rows in self.captured and smaller > 0 and smaller not in self.captured)


def read_batches(
    config: Any, rows: str = "batch", requests: int | None = None, sizes: list[int] | None = None
) -> Batches:
    """Return the batch sizes of a server from its resolved arguments.

    If the draft depth adapts, batches can have any size. If `rows` is "rank", the sizes count one rank's own rows.
    `requests` is the most requests that a scheduler runs at once. `sizes` contains the numbers of requests that SGLang
    captures. SGLang decides both after the weights have loaded. Until then they are None, and are predicted from the
    arguments.
    """
    ranks, share = attention_dp_size(config), 1
    pads, tokens = _pads(config), draft_tokens(config)
    own = _count_own(config) if requests is None else requests
    if rows == "rank":
        ranks, share = 1, config.tp_size // ranks
    sizes = list_captured(config) if sizes is None else sizes
    if config.speculative_adaptive:
        return Batches(always_pad=bool(sizes) or pads)
    captured = (size * tokens * ranks // share for size in sizes)
    return Batches(
        captured=tuple(dict.fromkeys(captured)),
        unit=tokens if share == 1 else 1,
        most=None if own is None else -(-own * tokens * ranks // share),
        always_pad=pads,
    )


def list_captured(config: Any) -> list[int]:
    """Return the numbers of requests for which attention ranks capture graphs, in ascending order.

    SGLang computes them in `get_batch_sizes_to_capture`.
    """
    graphs: Any = getattr(config, "cuda_graph_config", None)
    if str(config.device) != "cuda" or graphs is None or spell(graphs.decode.backend) == "disabled":
        return []
    tokens = draft_tokens(config)
    # An attention rank's tensor-parallel ranks share its rows equally, so the rows are a multiple of their number.
    divisor = config.tp_size // attention_dp_size(config) if _pads(config) else getattr(config, "attn_cp_size", 1)
    requests, sizes = _count_own(config), graphs.decode.bs or []
    if requests is not None:  # SGLang replaces larger sizes with this number, rounded up
        most = -(-requests // divisor) * divisor
        sizes = [min(size, most) for size in sizes]
    return sorted({size for size in sizes if size * tokens % divisor == 0})


def _pads(config: Any) -> bool:
    """Return whether all ranks pad their rows to the same number."""
    return attention_dp_size(config) > 1 or (routes_own_rows(config) and config.tp_size > 1)


def _count_own(config: Any) -> int | None:
    """Return the most requests that an attention rank runs at once, or None if the number is unknown."""
    requests: int | None = config.max_running_requests
    return None if requests is None else max(requests // attention_dp_size(config), 1)
