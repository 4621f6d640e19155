"""`expert_policy` in a request's `meta_info`: in how many of its steps the policy acted, counted on the host alone."""

from typing import Any, NamedTuple

KEY = "expert_policy"
"""The field of `meta_info`, and of the objects that carry the counts there."""


class Forward(NamedTuple):
    """One forward of the target: its policy, whether it was a decode or verify step, and whether the policy acted."""

    policy: str
    is_step: bool
    acts: bool


class ResponseMetadata:
    """The counts of one request: its decode and verify steps, and the steps in which the policy acted.

    The policy never acts for an `exact` request. `policies` are the active policies of these steps, in order. `exact`
    is False for a request that asked to be exact and is not, None for a request that did not ask.

    With each message of a request SGLang sends the slice of each value in `req.customized_info` that belongs to the
    message's tokens. Any slice of this object is a list of one item, the counts so far: one verification may give
    several tokens, so there is no item for each token.
    """

    def __init__(self, exact: bool | None = None) -> None:
        self.exact = exact
        self.policies: list[str] = []
        self.steps = self.of = 0

    def add(self, forward: Forward) -> None:
        """Count a forward. A prefill selects nothing, so its policy is named only if no step follows."""
        if not self.of:
            self.policies = [forward.policy]
        elif forward.is_step and forward.policy != self.policies[-1]:
            self.policies.append(forward.policy)
        self.of += forward.is_step
        self.steps += forward.acts and not self.exact

    def __getitem__(self, part: slice) -> list[dict[str, Any]]:
        metadata = {"policy": " > ".join(self.policies), "steps": self.steps, "of": self.of}
        return [metadata | ({} if self.exact is None else {"exact": self.exact})]


def count_forward(req: Any, forward: Forward) -> None:
    """Count a forward for one of its requests, in SGLang's scheduler."""
    if req.customized_info is None:
        req.customized_info = {}
    if KEY not in req.customized_info:
        req.customized_info[KEY] = ResponseMetadata(getattr(req, "expert_policy_exact", None))
    req.customized_info[KEY].add(forward)


def write_metadata(meta_info: dict[str, Any], state: Any) -> None:
    """Write the counts to `meta_info`, in SGLang's tokenizer process, with a request's last message.

    SGLang appends the field of every message to one list, and puts the list, or a stream's part of it, into
    `meta_info`. Both are removed here. The list holds None for a request without counts.
    """
    received = state.customized_info_accumulated.pop(KEY)
    meta_info.pop(KEY, None)
    if meta_info["finish_reason"] is not None and received and received[-1] is not None:
        meta_info[KEY] = received[-1]
