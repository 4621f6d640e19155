"""Exact requests and their rows in the current forward. No policy may change the output of an exact request."""

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
    """The exact requests of one scheduler, and flags that mark their rows in a forward.

    `requests` maps the id of each exact request to the request. SGLang keeps the requests alive, and an entry
    disappears with its request. Captured CUDA graphs read the flags in each replay. So the flags are written before a
    forward, on the stream of the forward. They are written only if the exact rows have changed since the last write.

    `low_first` is True if SGLang serves requests with a lower priority number first. `refusal` is an error message if
    the server cannot serve exact requests, else None. With `ignores_asked`, a request that asks to be exact follows
    the rule, like a request that makes no choice.
    """

    def __init__(
        self, device: str, low_first: bool = False, refusal: str | None = None, ignores_asked: bool = False
    ) -> None:
        self.requests: WeakValueDictionary[str, Any] = WeakValueDictionary()
        self._low_first, self.refusal, self._ignores_asked = low_first, refusal, ignores_asked
        self._flags = torch.zeros(MOST_ROWS, dtype=torch.bool, device=device)
        self._written: list[int] = []

    def admit(self, req: Any, rule: Rule, is_attached: bool = False) -> None:
        """Decide whether an arriving request is exact, and store the decision in `req.expert_policy_exact`.

        This attribute is True for an exact request. It is False if the request asked to be exact but is not. Otherwise
        it is None. All ranks make the same decision, and it holds for all steps of the request.

        An exact request shares cached prefixes only with other exact requests, because the keys and values of all other
        requests are computed under a policy. With `is_attached`, the cache has a storage backend, so an exact request
        is aborted.
        """
        if hasattr(req, "expert_policy_exact"):  # a retracted request arrives again
            return
        known = self.requests.get(req.rid)
        is_in_use = known is not None and not known.finished()
        routing_key = getattr(req, "routing_key", None)
        asked = read_asked(req.sampling_params.custom_params, routing_key)
        said = None if asked and self._ignores_asked else asked
        exact = applies(rule, req.priority, self._low_first) if said is None else said
        # A beam search cannot be exact: SGLang puts the rows of its further beams after the rows of all requests, and
        # `rids` does not contain these rows.
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
        """True if there is an exact request now, or if the last written flags mark any row."""
        return bool(self.requests or self._written)

    def write(self, rids: Sequence[str], tokens_per_request: int) -> None:
        """Write the flags for a decode or verify forward. The host does not wait for the device.

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
        """Return a mask [rows] bool, True for rows of this rank's exact requests. A graph reads it in each replay."""
        return self._flags[:rows]

    def find(self, rows: int) -> torch.Tensor | None:
        """Return the mask of `read`, or None if no row of the step can be exact.

        A CPU server has no CUDA graphs, so the result is None if no flag is set. A GPU server always returns the mask,
        because a captured step may be replayed later with exact rows.
        """
        return self.read(rows) if self._written or not self._flags.is_cpu else None
