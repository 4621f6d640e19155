"""What a response tells of the policy: in how many of its request's steps it acted. The host alone counts it."""

from __future__ import annotations

from typing import Any, NamedTuple

KEY = "expert_policy"
"""The field of `meta_info`, and of what carries it there."""


class Mark(NamedTuple):
    """One forward, as the requests in it tell of it: whether it was a decode or verify step, and whether some layer
    selected by the policy in force.
    """

    policy: str
    is_step: bool
    acts: bool


class Told:
    """The forwards of one request so far: decode or verify steps, those in which a policy acted, which is none of an
    `exact` one's, and the policies in force meanwhile, in order.

    SGLang sends with each message of a request, of everything in `req.customized_info`, the slice for the tokens in
    it. Of this one each slice is the whole sum, since one verification may give several tokens.
    """

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact
        self.policies: list[str] = []
        self.steps = self.of = 0

    def add(self, mark: Mark) -> None:
        """Count one forward more. A prefill selects nothing: its policy stands where no step follows it."""
        if not self.of:
            self.policies = [mark.policy]
        elif mark.is_step and mark.policy != self.policies[-1]:
            self.policies.append(mark.policy)
        self.of += mark.is_step
        self.steps += mark.acts and not self.exact

    def __getitem__(self, part: slice) -> list[dict[str, Any]]:
        told = {"policy": " > ".join(self.policies), "steps": self.steps, "of": self.of}
        return [told | ({"exact": True} if self.exact else {})]


def count(req: Any, mark: Mark) -> None:
    """Count a forward for a request in it, in SGLang's scheduler."""
    if req.customized_info is None:
        req.customized_info = {}
    if KEY not in req.customized_info:
        req.customized_info[KEY] = Told(getattr(req, "expert_policy_exact", False))
    req.customized_info[KEY].add(mark)


def tell(meta_info: dict[str, Any], state: Any) -> None:
    """Put what was counted into `meta_info` in SGLang's tokenizer process, as a request's last message comes.

    SGLang would append what came with every message to one list, and cut that to a stream's tokens: there is none left
    for it. A request that nothing was counted for has None in it.
    """
    told = state.customized_info_accumulated.pop(KEY)
    meta_info.pop(KEY, None)
    if meta_info["finish_reason"] is not None and told and told[-1] is not None:
        meta_info[KEY] = told[-1]
