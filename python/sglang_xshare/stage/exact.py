"""Exact requests, whose outputs no policy may change, and their rows in the current forward."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..policies.exact import Rule, applies, name_prefixes, read_asked

MOST_ROWS = 1 << 16
"""The most rows of a forward, with a flag of one byte each: a captured graph reads the flags at a fixed address."""
MIXED_SESSION = (
    "custom_params.expert_policy = 'exact': all turns of a streaming session must be exact: an earlier turn was not, "
    "and its keys and values stay in the cache"
)
ATTACHED = (
    "custom_params.expert_policy = 'exact': no storage backend may be attached to the server's cache: the backend may "
    "return what requests under a policy have stored"
)


class Exact:
    """The exact requests of one scheduler by id, while SGLang keeps the requests, and a flag for each row of a forward.

    The flags are written on the forward's stream, before each forward whose exact rows differ from those of the
    previous forward: captured graphs read the flags at each replay. With `low_first` lower priorities are served first.
    `refusal` is the answer to an exact request on a server that cannot serve any. With `ignores_asked` a request that
    asks to be exact follows the rule, like a request that does not ask.
    """

    def __init__(
        self, device: str, low_first: bool = False, refusal: str | None = None, ignores_asked: bool = False
    ) -> None:
        self.requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._low_first, self.refusal, self._ignores_asked = low_first, refusal, ignores_asked
        self._flags = torch.zeros(MOST_ROWS, dtype=torch.bool, device=device)
        self._written: list[int] = []

    def admit(self, req: Any, rule: Rule, is_attached: bool = False) -> None:
        """Decide whether all steps of an arriving request are exact, and set its `expert_policy_exact`.

        The value is True for an exact request, False for a request that asked and is not exact, else None. All ranks
        decide alike. Exact requests share prefixes with exact requests alone, because other requests have computed keys
        and values under a policy. With `is_attached` the cache has a storage backend, so an exact request is aborted.
        """
        if hasattr(req, "expert_policy_exact"):  # a retracted request arrives again
            return
        known = self.requests.get(req.rid)
        is_in_use = known is not None and not known.finished()
        routing_key = getattr(req, "routing_key", None)
        asked = read_asked(req.sampling_params.custom_params, routing_key)
        said = None if asked and self._ignores_asked else asked
        exact = applies(rule, req.priority, self._low_first) if said is None else said
        # A beam search cannot be exact: its other rows follow the rows of all requests, and `rids` do not name them.
        exact = exact and getattr(req, "beam_group", None) is None
        req.expert_policy_exact = exact or (False if asked else None)
        session = getattr(req, "session", None)
        if is_in_use:  # two front ends may use one id, and rows are found by id
            req.set_finish_with_abort(f"rid must be one that no running exact request has (got {req.rid!r})")
            return
        req.extra_key = name_prefixes(req.extra_key, exact)
        if not exact:
            self.requests.pop(req.rid, None)
            if session is not None:
                session.expert_policy_mixed = True
            return
        self.requests[req.rid] = req
        mixed = getattr(session, "streaming", False) and getattr(session, "expert_policy_mixed", False)
        refusal = self.refusal or (ATTACHED if is_attached else None) or (MIXED_SESSION if mixed else None)
        if refusal is not None:
            req.set_finish_with_abort(refusal)

    @property
    def is_used(self) -> bool:
        """True if a request is exact, or was exact in the last forward."""
        return bool(self.requests or self._written)

    def write(self, rids: Sequence[str], tokens_per_request: int) -> None:
        """Write the flags of a decode or verify forward, for the requests `rids` in their order. Wait for nothing."""
        tokens = range(tokens_per_request)
        numbers = [number for number, rid in enumerate(rids) if rid in self.requests]
        exact = [number * tokens_per_request + token for number in numbers for token in tokens]
        if exact != self._written:
            # A new pinned tensor each time: a copy may still read the last one.
            flags = torch.zeros(max(*exact, *self._written, 0) + 1, dtype=torch.bool)
            flags[exact] = True
            if self._flags.is_cuda:
                flags = flags.pin_memory()
            self._flags[: len(flags)].copy_(flags, non_blocking=True)
            self._written = exact

    def read(self, rows: int) -> torch.Tensor:
        """Return [rows] bool, True for this rank's rows of exact requests. A graph's replay reads the flags anew."""
        return self._flags[:rows]

    def find(self, rows: int) -> torch.Tensor | None:
        """Return the flags as `read` does, or None if no row of the step can be exact.

        A CPU replays no graph, so there the flags written last decide. On a GPU the flags are always returned, because
        a later replay may have exact rows.
        """
        return self.read(rows) if self._written or not self._flags.is_cpu else None
