"""A running server: its policy, and text forced through its own decode steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import orjson

from ..live.command import PolicyError, ask
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


class Server:
    """By its URL. Raises `PolicyError` in one line for whatever it refuses, and where nothing answers."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.api_key = api_key
        self._force = serialize_force()

    def get_policy(self) -> dict[str, Any]:
        """What GET /expert_policy answers."""
        return ask(self.url, None, self.api_key)

    def set_policy(self, policy: dict[str, Any]) -> dict[str, Any]:
        """Switch it."""
        return ask(self.url, policy, self.api_key)

    def get_model(self) -> str:
        """Its --model-path."""
        return str(self._ask("/get_model_info")["model_path"])

    def tokenize(self, text: str) -> list[int]:
        """By the model's own tokenizer, without special tokens."""
        return self._post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]

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
        answers = self._post("/generate", body)
        if [answer["output_ids"] for answer in answers] != list(texts):
            raise PolicyError(f"{self.url}: it decoded other tokens than those it was forced to")
        return [_read(answer["meta_info"]) for answer in answers]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return self._ask(path, orjson.dumps(body))

    def _ask(self, path: str, data: bytes | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            with urlopen(Request(self.url + path, data, headers), timeout=TIMEOUT) as response:
                return json.load(response)
        except HTTPError as error:
            raise PolicyError(f"{self.url}{path}: {error.code}: {_explain(error)}") from None
        except (URLError, OSError, ValueError) as error:
            raise PolicyError(f"{self.url}{path}: no answer ({getattr(error, 'reason', error)})") from None


def _read(info: dict[str, Any]) -> Forced:
    steps = []
    for (log_probability, token, _), top in zip(
        info["output_token_logprobs"], info["output_top_logprobs"], strict=True
    ):
        rivals = [other for _, other, _ in top if other != token]
        steps.append(read_step(log_probability, token, rivals[0] if rivals else None))
    return Forced([nats for nats, _ in steps[1:]], [token for _, token in steps[1:]])


def _explain(error: HTTPError) -> str:
    text = error.read().decode(errors="replace")
    if "custom_logit_processor" in text or "custom logit processor" in text.lower():
        return "no custom logit processors; allowed is a server with --enable-custom-logit-processor"
    try:
        answer = json.loads(text)
        return str(answer.get("error", answer.get("message", text)))[:300]
    except ValueError:
        return " ".join(text.split())[:300] or str(error.reason)
