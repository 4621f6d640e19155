"""The field `expert_policy` of a response's `meta_info`: the number of steps in which the policy acted."""

from typing import Any, NamedTuple

KEY = "expert_policy"
"""The name of the field in `meta_info`. The objects that carry the counts to `meta_info` use the same name."""


class Forward(NamedTuple):
    """The record of one forward of the target model. The scheduler counts it for each request of the forward.

    `policy` is the name of the active policy. `is_step` is True for a decode or verify step. `acts` is True if the
    policy selected experts.
    """

    policy: str
    is_step: bool
    acts: bool


class ResponseMetadata:
    """The counts of one request.

    `of` is the number of the request's decode and verify steps. `steps` is the number of these steps in which the
    policy acted. For an exact request, `steps` stays 0. `policies` contains the policies that were active in these
    steps, in order. `exact` is True for an exact request. It is False if the request asked to be exact but is not.
    Otherwise it is None.

    SGLang sends the output of a request in messages. With each message it sends a slice of every value in
    `req.customized_info`, for the tokens of this message. The counts do not belong to single tokens, because one verify
    step may emit several tokens. So any slice of this object is a list with one item: the counts so far.
    """

    def __init__(self, exact: bool | None = None) -> None:
        self.exact = exact
        self.policies: list[str] = []
        self.steps = self.of = 0

    def add(self, forward: Forward) -> None:
        """Count a forward. The policy of a prefill is reported only if no decode or verify step follows."""
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
    """Count a forward for one of its requests. This function runs in the scheduler process."""
    if req.customized_info is None:
        req.customized_info = {}
    if KEY not in req.customized_info:
        req.customized_info[KEY] = ResponseMetadata(getattr(req, "expert_policy_exact", None))
    req.customized_info[KEY].add(forward)


def write_metadata(meta_info: dict[str, Any], state: Any) -> None:
    """Write a request's counts to the `meta_info` of its last message.

    This function runs in the tokenizer process. SGLang appends the field of every message to one list, and writes the
    list to `meta_info`. For a stream it writes only a part of the list. This function removes both the list and the
    written field, and then writes the last item of the list. The list contains None for a request without counts.
    """
    received = state.customized_info_accumulated.pop(KEY)
    meta_info.pop(KEY, None)
    if meta_info["finish_reason"] is not None and received and received[-1] is not None:
        meta_info[KEY] = received[-1]
