"""`expert_policy` in a request's `meta_info`: in how many of its steps the policy acted, counted on the host alone."""

from typing import Any, NamedTuple

KEY = "expert_policy"
"""The field of `meta_info`, and of what carries it there."""


class Forward(NamedTuple):
    """One forward of the target: the policy in force, whether it was decode or verify, whether some layer selected."""

    policy: str
    is_step: bool
    acts: bool


class ResponseMetadata:
    """What is counted of one request: its decode and verify steps, those in which the policy acted (never for an
    `exact` request), and the policies in force meanwhile, in order. `exact` is False for a request that asked to be
    exact and is not, None for one that did not ask.

    SGLang sends with each message of a request the slice of everything in `req.customized_info` that belongs to the
    message's tokens. Any slice of this one is a list of the whole sum, since one verification may give several tokens.
    """

    def __init__(self, exact: bool | None = None) -> None:
        self.exact = exact
        self.policies: list[str] = []
        self.steps = self.of = 0

    def add(self, forward: Forward) -> None:
        """Count one forward more. A prefill selects nothing: its policy is named only where no step follows it."""
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
    """Count a forward for a request in it, in SGLang's scheduler."""
    if req.customized_info is None:
        req.customized_info = {}
    if KEY not in req.customized_info:
        req.customized_info[KEY] = ResponseMetadata(getattr(req, "expert_policy_exact", None))
    req.customized_info[KEY].add(forward)


def write_metadata(meta_info: dict[str, Any], state: Any) -> None:
    """Put what was counted into `meta_info`, in SGLang's tokenizer process, with a request's last message.

    SGLang appends what comes with every message to one list, and cuts that to a stream's tokens: the field is taken out
    of both here. It is None in the list for a request that nothing was counted for.
    """
    received = state.customized_info_accumulated.pop(KEY)
    meta_info.pop(KEY, None)
    if meta_info["finish_reason"] is not None and received and received[-1] is not None:
        meta_info[KEY] = received[-1]
