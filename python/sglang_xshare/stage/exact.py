"""Exact requests, whose outputs no policy may change, and their rows in the current forward."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..policies.exact import Rule, applies, name_prefixes, read_asked

MOST_ROWS = 1 << 16
"""The maximum number of rows in a forward. Each row has a flag of one byte. The tensor of flags has a fixed size,
because captured CUDA graphs read the flags at a fixed address.
"""
MIXED_SESSION = (
    "custom_params.expert_policy = 'exact': all turns of a streaming session must be exact: an earlier turn was not, "
    "and its keys and values stay in the cache"
)
ATTACHED = (
    "custom_params.expert_policy = 'exact': no storage backend may be attached to the server's cache: the backend may "
    "return what requests under a policy have stored"
)


class Exact:
    """The exact requests of one scheduler, and a flag for each row of a forward that marks the rows of exact requests.

    `requests` contains the exact requests by id, as long as SGLang keeps them. Captured graphs read the flags in each
    replay. So the flags are written on the forward's stream, before each forward whose exact rows differ from those of
    the previous forward.

    With `low_first`, lower priority numbers are served first. `refusal` is the error for exact requests on a server
    that cannot serve them. With `ignores_asked`, a request that asks to be exact is treated like a request without a
    choice.
    """

    def __init__(
        self, device: str, low_first: bool = False, refusal: str | None = None, ignores_asked: bool = False
    ) -> None:
        self.requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._low_first, self.refusal, self._ignores_asked = low_first, refusal, ignores_asked
        self._flags = torch.zeros(MOST_ROWS, dtype=torch.bool, device=device)
        self._written: list[int] = []

    def admit(self, req: Any, rule: Rule, is_attached: bool = False) -> None:
        """Decide whether an arriving request is exact in all of its steps, and set its `expert_policy_exact`.

        `expert_policy_exact` is True for an exact request. It is False for a request that asked to be exact and is not,
        and None for any other request. All ranks decide alike. Exact requests share cached prefixes only with exact
        requests, because the keys and values of all other requests are computed under a policy. With `is_attached`, the
        cache has a storage backend, so an exact request is aborted.
        """
        if hasattr(req, "expert_policy_exact"):  # a retracted request arrives again
            return
        known = self.requests.get(req.rid)
        is_in_use = known is not None and not known.finished()
        routing_key = getattr(req, "routing_key", None)
        asked = read_asked(req.sampling_params.custom_params, routing_key)
        said = None if asked and self._ignores_asked else asked
        exact = applies(rule, req.priority, self._low_first) if said is None else said
        # A beam search cannot be exact: SGLang puts its further rows after the rows of all requests, and `rids` does
        # not contain them.
        exact = exact and getattr(req, "beam_group", None) is None
        req.expert_policy_exact = exact or (False if asked else None)
        session = getattr(req, "session", None)
        if is_in_use:  # two front ends may send the same id, and rows are found by id
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
        """True if there is an exact request now, or if the last forward had exact rows."""
        return bool(self.requests or self._written)

    def write(self, rids: Sequence[str], tokens_per_request: int) -> None:
        """Write the flags for the rows of a decode or verify forward, without waiting for the device.

        `rids` are the ids of the forward's requests, in the order of their rows.
        """
        tokens = range(tokens_per_request)
        numbers = [number for number, rid in enumerate(rids) if rid in self.requests]
        exact = [number * tokens_per_request + token for number in numbers for token in tokens]
        if exact != self._written:
            # Each write uses a new pinned tensor, because an earlier copy may still read the previous tensor.
            flags = torch.zeros(max(*exact, *self._written, 0) + 1, dtype=torch.bool)
            flags[exact] = True
            if self._flags.is_cuda:
                flags = flags.pin_memory()
            self._flags[: len(flags)].copy_(flags, non_blocking=True)
            self._written = exact

    def read(self, rows: int) -> torch.Tensor:
        """Return flags [rows] bool, True for rows of exact requests. A graph reads the flags again in each replay."""
        return self._flags[:rows]

    def find(self, rows: int) -> torch.Tensor | None:
        """Return the flags like `read`, or None if no row of the step can be exact.

        A CPU server has no CUDA graphs, so it returns None if the last write has set no flag. A GPU server always
        returns the flags, because a captured step may be replayed with exact rows later.
        """
        return self.read(rows) if self._written or not self._flags.is_cpu else None
