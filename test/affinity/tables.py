"""Small tables of signatures, made without a model."""

import numpy as np

from sglang_xshare.affinity.table import Table

ORIGIN = {"model type": "qwen3_moe", "number of layers": "4", "number of experts": "64"}
ORIGIN |= {"vocabulary": "66", "tokenizer": ""}
TOPICS = 4
WORDS = 16
"""Token ids of a topic; those of topic t begin at t * WORDS."""


def make_table() -> Table:
    """One where ids of each topic point their own way; two ids beyond them are unknown, and 0."""
    signatures = np.zeros((TOPICS * WORDS + 2, 16), dtype=np.float16)
    for topic in range(TOPICS):
        signatures[topic * WORDS : (topic + 1) * WORDS] = 1 / TOPICS * -0.1
        signatures[topic * WORDS : (topic + 1) * WORDS, topic] = 1
    samples = signatures[: TOPICS * WORDS : 4].astype(np.float32)
    samples /= np.linalg.norm(samples, axis=1, keepdims=True)
    return Table(signatures, samples.astype(np.float16), ORIGIN)


def prompt(topic: int, length: int = 40, start: int = 0) -> list[int]:
    """Tokens of a topic; another `start` gives another prompt."""
    return [topic * WORDS + (start + 7 * place + place // WORDS) % WORDS for place in range(length)]
