"""Measurements of the accepted length of an EAGLE-3 draft model. They need no server."""

from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from training.corpus import DOMAINS
from training.eagle3 import Draft, features
from training.report import heldout_ids

STEPS_AHEAD = 3
PROMPTS, PROMPT, WRITTEN = 16, 64, 128  # prompts per domain, tokens per prompt, measured tokens after each prompt


@torch.inference_mode()
def draft_hits(target: Qwen3MoeForCausalLM, draft: Draft, hot: Tensor, ids: Tensor) -> list[Tensor]:
    """Return whether the draft tokens are equal to the text `ids` [rows, tokens].

    The result contains a bool tensor [rows, tokens - step - 2] for each draft step.
    """
    _, aux = features(target, ids)
    guesses = draft(aux, target.model.embed_tokens(ids), STEPS_AHEAD)
    return [hot[guess[:, :-1].argmax(-1)] == ids[:, step + 2 :] for step, guess in enumerate(guesses)]


@torch.inference_mode()
def target_hits(target: Qwen3MoeForCausalLM, ids: Tensor) -> list[Tensor]:
    """Return the result of `draft_hits` for a draft model that is equal to the target model."""
    hits = target(ids).logits[:, :-1].argmax(-1) == ids[:, 1:]
    return [hits[:, step + 1 :] for step in range(STEPS_AHEAD)]


def accepted_lengths(hits: list[Tensor], prompt: int) -> list[int]:
    """Return the number of tokens that each verify step gives, including the target's own token.

    The verify steps begin after `prompt` tokens. A draft token is accepted if it is equal to the text. If the text is a
    greedy continuation, the lengths are the same as in a server with top-k 1 and temperature 0.
    """
    lengths = []
    for row in range(len(hits[0])):
        place = prompt - 1
        while place < hits[-1].shape[1]:
            accepted = 0
            while accepted < len(hits) and hits[accepted][row, place]:
                accepted += 1
            lengths.append(accepted + 1)
            place += accepted + 1
    return lengths


def continuations(target: Qwen3MoeForCausalLM, prompts: Tensor, written: int) -> Tensor:
    """Generate `written` greedy tokens after each of the prompts [rows, tokens], and return [rows, tokens + written].

    The generation does not stop at end-of-text tokens.
    """
    everywhere = torch.ones_like(prompts)  # otherwise `generate` treats end-of-text tokens as padding
    return target.generate(
        prompts, attention_mask=everywhere, max_new_tokens=written, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def spread(ids: Tensor, length: int) -> Tensor:
    """Cut PROMPTS evenly spaced pieces from `ids` [tokens], and return them as [PROMPTS, length]."""
    starts = torch.linspace(0, len(ids) - length, PROMPTS).long()
    return torch.stack([ids[start : start + length] for start in starts])


def measure(
    target: Qwen3MoeForCausalLM, draft: Draft, hot: Tensor, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, Any]:
    """Measure the mean accepted length after held-out prompts, for each domain and for all domains together.

    - `written`: the text is the target's greedy continuation.
    - `on_text`: the text is the held-out text.
    - `target_on_text`: the text is the held-out text, and the draft model is the target model itself.
    """
    lengths: dict[str, dict[str, list[int]]] = {"written": {}, "on_text": {}, "target_on_text": {}}
    for domain in DOMAINS:
        ids = heldout_ids(tokenizer, folder, domain)
        greedy, text = continuations(target, spread(ids, PROMPT), WRITTEN), spread(ids, PROMPT + WRITTEN)
        lengths["written"][domain] = accepted_lengths(draft_hits(target, draft, hot, greedy), PROMPT)
        lengths["on_text"][domain] = accepted_lengths(draft_hits(target, draft, hot, text), PROMPT)
        lengths["target_on_text"][domain] = accepted_lengths(target_hits(target, text), PROMPT)
    return {
        "steps": STEPS_AHEAD,
        "topk": 1,
        "prompts_per_domain": PROMPTS,
        "prompt_tokens": PROMPT,
        "written_tokens": WRITTEN,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
        "accepted_length": {
            kind: {domain: fmean(own) for domain, own in by_domain.items()}
            | {"all": fmean(chain.from_iterable(by_domain.values()))}
            for kind, by_domain in lengths.items()
        },
    }
