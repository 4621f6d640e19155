"""Requests that accept no change: which they are, and their rows in the forward at hand."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..policies.exact import Rule, applies, name_prefixes, read_asked

MOST_ROWS = 1 << 16
"""Rows that the flags have room for, a byte each: a captured graph reads them where they lie."""
MIXED_SESSION = (
    "custom_params.expert_policy = 'exact': an earlier turn of this streaming session was not exact, and its keys and "
    "values stay; allowed is a session whose turns are all exact"
)

ATTACHED = (
    "custom_params.expert_policy = 'exact': a storage backend is attached to the server's cache, which may give it "
    "what requests under policy have stored; allowed is none"
)


class Exact:
    """The exact requests of one scheduler, known by their id as long as SGLang keeps them, and a flag for each row.

    The flags are written before a forward whose exact rows are others than those of the last, on its stream: captured
    graphs read them at each replay. With `low_first` the server's lower priorities go first. `refusal` is why a server
    can have none, and what one that asks is answered. With `ignores_asked` a request that asks follows the rule, like
    one that says nothing.
    """

    def __init__(
        self, device: str, low_first: bool = False, refusal: str | None = None, ignores_asked: bool = False
    ) -> None:
        self.requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._low_first, self._refusal, self._ignores_asked = low_first, refusal, ignores_asked
        self._flags = torch.zeros(MOST_ROWS, dtype=torch.bool, device=device)
        self._written: list[int] = []

    def admit(self, req: Any, rule: Rule, is_attached: bool = False) -> None:
        """Decide once, as a request arrives, whether it is exact: True, False where it asked and is not, else None.
        Prefixes are shared among exact requests alone: what others have generated has keys and values of their steps.
        With `is_attached` there is a storage of prefixes.
        """
        if hasattr(req, "expert_policy_exact"):  # retracted, it arrives again
            return
        known = self.requests.get(req.rid)
        is_in_use = known is not None and not known.finished()
        routing_key = getattr(req, "routing_key", None)
        asked = read_asked(req.sampling_params.custom_params, routing_key)
        said = None if asked and self._ignores_asked else asked
        exact = applies(rule, req.priority, self._low_first) if said is None else said
        # A beam's other rows lie behind all requests, and belong to none that a forward names.
        exact = exact and getattr(req, "beam_group", None) is None
        req.expert_policy_exact = exact or (False if asked else None)
        session = getattr(req, "session", None)
        if is_in_use:  # through another front end: each knows its own ids alone, and rows are told apart by them
            req.set_finish_with_abort(f"rid {req.rid!r}: an exact request that is still answered has it")
            return
        req.extra_key = name_prefixes(req.extra_key, exact)
        if not exact:
            self.requests.pop(req.rid, None)
            if session is not None:
                session.expert_policy_mixed = True
            return
        self.requests[req.rid] = req
        mixed = getattr(session, "streaming", False) and getattr(session, "expert_policy_mixed", False)
        refusal = self._refusal or (ATTACHED if is_attached else None) or (MIXED_SESSION if mixed else None)
        if refusal is not None:
            req.set_finish_with_abort(refusal)

    @property
    def is_used(self) -> bool:
        """Whether a request is exact, or was in the last forward."""
        return bool(self.requests or self._written)

    def write(self, rids: Sequence[str], tokens_per_request: int) -> None:
        """Write the flags of a decode or verify forward of these requests, in order. The host waits for nothing."""
        tokens = range(tokens_per_request)
        numbers = [number for number, rid in enumerate(rids) if rid in self.requests]
        exact = [number * tokens_per_request + token for number in numbers for token in tokens]
        if exact != self._written:
            # Of a pinned tensor of its own: the last one may still be read.
            flags = torch.zeros(max(*exact, *self._written, 0) + 1, dtype=torch.bool)
            flags[exact] = True
            if self._flags.is_cuda:
                flags = flags.pin_memory()
            self._flags[: len(flags)].copy_(flags, non_blocking=True)
            self._written = exact

    def read(self, rows: int) -> torch.Tensor:
        """[rows] bool: which of this rank's rows are of exact requests. A graph's replay reads it anew."""
        return self._flags[:rows]

    def find(self, rows: int) -> torch.Tensor | None:
        """Return the flags as `read` does, or None if no row of a step or of a graph's replays can be exact.

        A server that refuses exact requests has no exact row. A CPU replays no graph, so the rows written last decide.
        """
        if self._refusal is not None:
            return None
        return self.read(rows) if self._written or not self._flags.is_cpu else None
