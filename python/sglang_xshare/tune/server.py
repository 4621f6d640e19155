"""A running server: its policy, and text forced through its own decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..live.client import Client, PolicyError
from .forcing import read_step, serialize_force

TIMEOUT = 1800.0
"""Seconds: a batch decodes in one request."""


@dataclass(frozen=True)
class Forced:
    """One text decoded by force: its nats after the prompt but for the first token, which is the prefill's, and the
    tokens that the model liked best there.
    """

    nats: list[float]
    greedy: list[int]


class Server(Client):
    """By its URL. Raises `PolicyError` in one line for whatever it refuses, and where nothing answers."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        super().__init__(url, api_key)
        self._force = serialize_force()

    def get_model(self) -> str:
        """Its --model-path."""
        return str(self.ask("/get_model_info", timeout=TIMEOUT)["model_path"])

    def tokenize(self, text: str) -> list[int]:
        """By the model's own tokenizer, without special tokens."""
        answer = self.ask("/tokenize", {"prompt": text, "add_special_tokens": False}, TIMEOUT)
        return [int(token) for token in answer["tokens"]]

    def force(self, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> list[Forced]:
        """Decode each text after its prompt, all in one batch. Texts are equally long."""
        length = len(texts[0])
        sampling = {"temperature": 0.0, "max_new_tokens": length, "ignore_eos": True}
        body = {
            "input_ids": list(prompts),
            "sampling_params": [sampling | {"custom_params": {"tokens": text}} for text in texts],
            "custom_logit_processor": self._force,
            "return_logprob": True,
            "top_logprobs_num": 2,
        }
        try:
            answers = self.ask("/generate", body, TIMEOUT)
        except PolicyError as error:
            if "custom logit processor" not in str(error).lower().replace("_", " "):
                raise
            reason = "no custom logit processors; allowed is a server with --enable-custom-logit-processor"
            raise PolicyError(f"{self.url}: {reason}", error.status) from None
        if [answer["output_ids"] for answer in answers] != list(texts):
            raise PolicyError(f"{self.url}: it decoded other tokens than those it was forced to")
        return [_read(answer["meta_info"]) for answer in answers]


def _read(info: dict[str, Any]) -> Forced:
    steps = []
    for (log_probability, token, _), top in zip(
        info["output_token_logprobs"], info["output_top_logprobs"], strict=True
    ):
        rivals = [other for _, other, _ in top if other != token]
        steps.append(read_step(log_probability, token, rivals[0] if rivals else None))
    return Forced([nats for nats, _ in steps[1:]], [token for _, token in steps[1:]])
