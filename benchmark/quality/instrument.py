"""A client that measures a running server. It can force the server to decode or verify a given text."""

from collections.abc import Sequence
from typing import Any

from sglang_xshare.live.client import PolicyError
from sglang_xshare.tune.forcing import Prediction
from sglang_xshare.tune.server import TIMEOUT, Server
from sglang_xshare.tune.texts import Sample

GREEDY = {"temperature": 0.0, "ignore_eos": True}


class Instrument(Server):
    """A client of a running server.

    The server must allow policy switches and custom logit processors. It must have no other traffic, because the
    client counts its steps.
    """

    def get_draft_tokens(self) -> int:
        """Return the number of tokens that a verify step checks per request, or 1 without speculative decoding."""
        info = self.ask("/server_info")
        return int(info["speculative_num_draft_tokens"]) if info.get("speculative_algorithm") else 1

    def generate(self, prompts: Sequence[list[int]], tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        """Send all prompts as one batch to /generate, and return the greedy answers."""
        sampling = GREEDY | {"max_new_tokens": tokens} | sampling
        return list(self.ask("/generate", {"input_ids": list(prompts), "sampling_params": sampling}, TIMEOUT))

    def verify(self, samples: Sequence[Sample], top: int) -> list[list[Prediction]]:
        """Return the predictions for each sample's text. Every token is verified, and all samples form one batch.

        SGLang applies logit processors after a prefill, but not in EAGLE's verify steps. So each token of the text has
        its own request. The server prefills the text before the token, and is forced to answer with the token. Then the
        server runs one verify step with this token and its own draft tokens. The first row of the verify step predicts
        the next token. Because each step follows a prefill, errors do not accumulate over the text, unlike in `force`.
        """
        self.generate([one.prompt + one.text for one in samples], 1)  # stores the whole text in the prefix cache
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
    """An instrument for a server with speculative decoding. The server verifies the texts instead of decoding them."""

    def force(self, prompts: Sequence[list[int]], texts: Sequence[list[int]], top: int = 2) -> list[list[Prediction]]:
        """Return the predictions for each text, as `verify` does."""
        return self.verify([Sample(*pair) for pair in zip(prompts, texts, strict=True)], top)


def find_instrument(url: str, api_key: str | None) -> Instrument:
    """Return the instrument for a running server: a `Verifier` if the server uses speculative decoding."""
    server = Instrument(url, api_key)
    return server if server.get_draft_tokens() == 1 else Verifier(url, api_key)


def _read_verified(info: dict[str, Any], token: int) -> Prediction:
    """Return the prediction for `token`, from the first row of the verify step."""
    likeliest = {other: score for score, other, _ in info["output_top_logprobs"][1] if score is not None}
    score = info["output_token_ids_logprobs"][1][0][0]
    return Prediction(-score, max(likeliest, key=likeliest.__getitem__), likeliest | {token: score})
