"""A running server that decodes forced text in its own decode steps."""

from collections.abc import Sequence
from typing import Any

from ..live.client import Client, PolicyError
from ..policies.exact import KEY, SHARED
from .forcing import Prediction, read_step, serialize_force

TIMEOUT = 1800.0
"""The timeout of a request in seconds. It is long because one request decodes a whole batch."""


class Server(Client):
    """A client of one server. Its methods raise `PolicyError` if the server refuses or does not answer."""

    def get_model(self) -> str:
        """Return the server's --model-path."""
        return str(self.ask("/get_model_info", timeout=TIMEOUT)["model_path"])

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text with the model's own tokenizer, without special tokens."""
        answer = self.ask("/tokenize", {"prompt": text, "add_special_tokens": False}, TIMEOUT)
        return [int(token) for token in answer["tokens"]]

    def force(self, prompts: Sequence[list[int]], texts: Sequence[list[int]], top: int = 2) -> list[list[Prediction]]:
        """Decode each text after its prompt, all in one batch. Return the model's predictions.

        The requests follow the policy, even if requests are exact by default. All texts must have the same length. The
        first token of a text has no prediction, because the prefill generates it. Each step reports the `top` most
        likely tokens. `top` must be at least two and at most the size of the vocabulary, because a server ends if more
        are requested.
        """
        length = len(texts[0])
        sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
        body = {
            "input_ids": list(prompts),
            "sampling_params": [sampling | {"custom_params": {"tokens": text, KEY: SHARED}} for text in texts],
            "top_logprobs_num": top,
        }
        answers = self.ask_forced(body)
        if [answer["output_ids"] for answer in answers] != list(texts):
            raise PolicyError(f"{self.url}: the server decoded other tokens than the forced ones")
        return [_read(answer["meta_info"]) for answer in answers]

    def ask_forced(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Send requests with forced tokens to /generate. Return the answers, which contain log-probabilities."""
        forced = {"custom_logit_processor": serialize_force(), "return_logprob": True}
        try:
            return list(self.ask("/generate", body | forced, TIMEOUT))
        except PolicyError as error:
            if "custom logit processor" not in str(error).lower().replace("_", " "):
                raise
            reason = "no custom logit processors; the server must have --enable-custom-logit-processor"
            raise PolicyError(f"{self.url}: {reason}", error.status) from None


def _read(info: dict[str, Any]) -> list[Prediction]:
    answers = zip(info["output_token_logprobs"], info["output_top_logprobs"], strict=True)
    steps = [
        read_step(score, token, [(other, rival) for other, rival, _ in top if rival != token])
        for (score, token, _), top in answers
    ]
    return steps[1:]
