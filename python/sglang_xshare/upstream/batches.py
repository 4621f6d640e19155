"""Which batches a server's steps can have, in router rows: what a plan by batch size can meet, and where padding is."""

import sys
from dataclasses import dataclass
from typing import Any

from .server import attention_dp_size, routes_own_rows, spell


@dataclass(frozen=True)
class Batches:
    """Of a server that captures graphs for `captured` rows, ascending, none where it captures nothing. Larger batches,
    up to `most` live rows where that is known, run as they come, in multiples of `unit`: a request's draft tokens.

    `always_pad` says that a step of any size may hold padding: attention ranks pad each other.
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
        """Whether some step has `first` rows, to `last` where that is given."""
        last = sys.maxsize if last is None else last
        if self.most is not None:
            last = min(last, next((rows for rows in self.captured if rows >= self.most), self.most))
        eager = max(first, self.captured[-1] + 1 if self.captured else 1)
        return any(first <= rows <= last for rows in self.captured) or last // self.unit * self.unit >= eager

    def pad(self, rows: int) -> bool:
        """Whether some of a step's `rows` may be padding."""
        smaller = rows - self.unit
        return self.always_pad or (rows in self.captured and smaller > 0 and smaller not in self.captured)


def read_batches(
    config: Any, rows: str = "batch", requests: int | None = None, sizes: list[int] | None = None
) -> Batches:
    """Return the batches of a server by its resolved arguments, any if drafts adapt; with `rows` "rank" one rank's own.
    `requests` are the most that a scheduler runs at once, and `sizes` the numbers of requests that SGLang captures.
    SGLang decides both after the weights have loaded; before, `list_captured` predicts the sizes.
    """
    ranks, share = attention_dp_size(config), 1
    pads, tokens = _pads(config), config.speculative_num_draft_tokens or 1
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
    """The requests, ascending, that an attention rank of a server with these resolved arguments captures graphs for, as
    SGLang's `get_batch_sizes_to_capture` has it.
    """
    graphs: Any = getattr(config, "cuda_graph_config", None)
    if str(config.device) != "cuda" or graphs is None or spell(graphs.decode.backend) == "disabled":
        return []
    tokens = config.speculative_num_draft_tokens or 1
    # Ranks that gather rows divide those of an attention rank among themselves.
    divisor = config.tp_size // attention_dp_size(config) if _pads(config) else getattr(config, "attn_cp_size", 1)
    requests, sizes = _count_own(config), graphs.decode.bs or []
    if requests is not None:  # as many at most, aligned, in place of what is larger
        most = -(-requests // divisor) * divisor
        sizes = [min(size, most) for size in sizes]
    return sorted({size for size in sizes if size * tokens % divisor == 0})


def _pads(config: Any) -> bool:
    """Whether attention ranks pad each other."""
    return attention_dp_size(config) > 1 or (routes_own_rows(config) and config.tp_size > 1)


def _count_own(config: Any) -> int | None:
    """The requests that an attention rank runs at most, as SGLang shares them out."""
    requests: int | None = config.max_running_requests
    return None if requests is None else max(requests // attention_dp_size(config), 1)
