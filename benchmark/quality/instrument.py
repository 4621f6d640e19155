"""A running server as the instrument: text forced through its decode or verify steps, and what it answers freely."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_xshare.live.client import PolicyError
from sglang_xshare.tune.measure import check_rows
from sglang_xshare.tune.server import TIMEOUT, Forced, Server
from sglang_xshare.tune.texts import Sample

GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Counted:
    """Means over the steps since a switch of policy, of each MoE layer: active experts before and after, kept mass.
    None for a layer in which nothing selected.
    """

    layers: list[tuple[float, float, float] | None]

    @property
    def anything(self) -> bool:
        """Whether any layer was counted."""
        return any(self.layers)


class Instrument(Server):
    """A server with live control that takes logit processors. It must have no other traffic: steps are counted."""

    def get_draft_tokens(self) -> int:
        """Tokens of a request in a verify step; 1 without speculation."""
        info = self.ask("/server_info")
        return int(info["speculative_num_draft_tokens"]) if info.get("speculative_algorithm") else 1

    def switch(self, policy: dict[str, Any]) -> None:
        """To another policy, from which on `count` counts."""
        self._began = self.set_policy(policy)["counters"]["by_layer"]

    def count(self, rows: int) -> Counted:
        """What was counted since `switch`, in steps of so many router rows. Raises ValueError where they had others."""
        told = self.get_policy()
        if told["since_switch"]["layer_steps"]:
            check_rows(told["since_switch"], rows)
        now = told["counters"]["by_layer"]
        return Counted([_average(*both) for both in zip(self._began, now, strict=True)])

    def generate(self, prompts: Sequence[list[int]], tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        """Greedy answers, all in one batch, as upstream's /generate tells them."""
        sampling = GREEDY | {"max_new_tokens": tokens} | sampling
        return list(self.ask("/generate", {"input_ids": list(prompts), "sampling_params": sampling}, TIMEOUT))

    def verify(self, samples: Sequence[Sample], top: int) -> list[Forced]:
        """Have the text of each sample verified token by token, all in one batch, as `force` has it decoded.

        Upstream applies logit processors to what a prefill says, but not to what EAGLE verifies. So each token of the
        text is forced as the first answer to what stands before it, and a verify step of that token and the server's
        own drafts follows: its first row is the model's opinion of the next token. What stands before has always been
        prefilled: the loss is that of single steps, whose errors do not add up over the text as in `force`.
        """
        self.generate([one.prompt + one.text for one in samples], 1)  # the cache keeps what came first
        told: list[list[tuple[float, int, dict[int, float]]]] = [[] for _ in samples]
        for place in range(len(samples[0].text) - 1):
            steps = self._verify_token(samples, place, top)
            for one, step in zip(told, steps, strict=True):
                one.append(step)
        return [Forced(*(list(column) for column in zip(*one, strict=True))) for one in told]

    def _verify_token(
        self, samples: Sequence[Sample], place: int, top: int
    ) -> list[tuple[float, int, dict[int, float]]]:
        prompts = [one.prompt + one.text[:place] for one in samples]
        tokens, following = ([one.text[place + ahead] for one in samples] for ahead in (0, 1))
        sampling = [GREEDY | {"max_new_tokens": 2, "custom_params": {"tokens": [token]}} for token in tokens]
        body = {
            "input_ids": prompts,
            "sampling_params": sampling,
            "top_logprobs_num": top,
            "token_ids_logprob": [[token] for token in following],
        }
        answers = self.ask_forced(body)
        if [answer["output_ids"][0] for answer in answers] != tokens:
            raise PolicyError(f"{self.url}: it began with other tokens than those it was forced to")
        return [_read_verified(answer["meta_info"], token) for answer, token in zip(answers, following, strict=True)]


def _average(then: dict[str, Any], now: dict[str, Any]) -> tuple[float, float, float] | None:
    """(experts before, after, kept mass) of a layer between two counts; None where it has not counted."""
    new = {name: now[name] - then[name] for name in now}
    steps = new["layer_steps"]
    if not steps:
        return None
    return new["experts_before"] / steps, new["experts_after"] / steps, new["kept_mass"] / max(new["rows"], 1)


def _read_verified(info: dict[str, Any], token: int) -> tuple[float, int, dict[int, float]]:
    """(nats of `token`, the likeliest one, log-probabilities of the likeliest and of it) in the first verified row."""
    likeliest = {other: score for score, other, _ in info["output_top_logprobs"][1] if score is not None}
    score = info["output_token_ids_logprobs"][1][0][0]
    return -score, max(likeliest, key=likeliest.__getitem__), likeliest | {token: score}
