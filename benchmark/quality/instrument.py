"""A running server as the instrument: text forced through its decode or verify steps, and free answers."""

from collections.abc import Sequence
from typing import Any

from sglang_xshare.live.client import PolicyError
from sglang_xshare.tune.forcing import Prediction
from sglang_xshare.tune.server import TIMEOUT, Server
from sglang_xshare.tune.texts import Sample

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Instrument(Server):
    """A server with live control and logit processors, without other traffic, because steps are counted."""

    def get_draft_tokens(self) -> int:
        """Return the tokens of a request in a verify step; 1 without speculation."""
        info = self.ask("/server_info")
        return int(info["speculative_num_draft_tokens"]) if info.get("speculative_algorithm") else 1

    def generate(self, prompts: Sequence[list[int]], tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        """Return greedy answers of upstream's /generate, all in one batch."""
        sampling = GREEDY | {"max_new_tokens": tokens} | sampling
        return list(self.ask("/generate", {"input_ids": list(prompts), "sampling_params": sampling}, TIMEOUT))

    def verify(self, samples: Sequence[Sample], top: int) -> list[list[Prediction]]:
        """Return the predictions of each sample's text, verified token by token, all samples in one batch.

        Upstream applies logit processors to the result of a prefill, but not to EAGLE's verification. So each token of
        the text is forced as the first answer to the text before it. A verify step of that token and the server's own
        drafts follows; its first row predicts the next token. The text before has always been prefilled: the loss is
        that of single steps, whose errors do not accumulate over the text as in `force`.
        """
        self.generate([one.prompt + one.text for one in samples], 1)  # the cache keeps the prefix
        predicted: list[list[Prediction]] = [[] for _ in samples]
        for place in range(len(samples[0].text) - 1):
            steps = self._verify_token(samples, place, top)
            for one, step in zip(predicted, steps, strict=True):
                one.append(step)
        return predicted

    def _verify_token(self, samples: Sequence[Sample], place: int, top: int) -> list[Prediction]:
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
            raise PolicyError(f"{self.url}: the answers must begin with the forced tokens")
        return [_read_verified(answer["meta_info"], token) for answer, token in zip(answers, following, strict=True)]


class Verifier(Instrument):
    """An instrument of a server that speculates: it verifies texts instead of decoding them."""

    def force(self, prompts: Sequence[list[int]], texts: Sequence[list[int]], top: int = 2) -> list[list[Prediction]]:
        """Return the predictions of `verify`."""
        return self.verify([Sample(*pair) for pair in zip(prompts, texts, strict=True)], top)


def find_instrument(url: str, api_key: str | None) -> Instrument:
    """Return the instrument of a running server, which verifies if the server speculates."""
    server = Instrument(url, api_key)
    return server if server.get_draft_tokens() == 1 else Verifier(url, api_key)


def _read_verified(info: dict[str, Any], token: int) -> Prediction:
    """Return the prediction of `token` in the first verified row."""
    likeliest = {other: score for score, other, _ in info["output_top_logprobs"][1] if score is not None}
    score = info["output_token_ids_logprobs"][1][0][0]
    return Prediction(-score, max(likeliest, key=likeliest.__getitem__), likeliest | {token: score})
