"""The number of draft tokens that a verify step accepts from an EAGLE-3 draft, from the models without a server."""

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
PROMPTS, PROMPT, WRITTEN = 16, 64, 128  # a domain's held-out prompts, their length, the tokens measured after each


@torch.inference_mode()
def draft_hits(target: Qwen3MoeForCausalLM, draft: Draft, hot: Tensor, ids: Tensor) -> list[Tensor]:
    """Return whether each place's draft repeats `ids` [rows, tokens], by draft step: [rows, tokens - step - 2] bool."""
    _, aux = features(target, ids)
    guesses = draft(aux, target.model.embed_tokens(ids), STEPS_AHEAD)
    return [hot[guess[:, :-1].argmax(-1)] == ids[:, step + 2 :] for step, guess in enumerate(guesses)]


@torch.inference_mode()
def target_hits(target: Qwen3MoeForCausalLM, ids: Tensor) -> list[Tensor]:
    """Return the hits of a draft that is the target itself, in the form of `draft_hits`."""
    hits = target(ids).logits[:, :-1].argmax(-1) == ids[:, 1:]
    return [hits[:, step + 1 :] for step in range(STEPS_AHEAD)]


def accepted_lengths(hits: list[Tensor], prompt: int) -> list[int]:
    """Return the tokens of each verify step of a chain of drafts after `prompt` tokens, its own token included.

    A draft token is accepted if it repeats the text. On greedy continuations the steps are those of a server at top-k 1
    and temperature 0, and the length is the server's.
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
    """Return the target's greedy text after `prompts` [rows, tokens], past ends of text: [rows, tokens + written]."""
    everywhere = torch.ones_like(prompts)  # otherwise `generate` takes an end of text for padding
    return target.generate(
        prompts, attention_mask=everywhere, max_new_tokens=written, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def spread(ids: Tensor, length: int) -> Tensor:
    """Return PROMPTS pieces of `length` ids, evenly spread over `ids` [tokens]: [PROMPTS, length]."""
    starts = torch.linspace(0, len(ids) - length, PROMPTS).long()
    return torch.stack([ids[start : start + length] for start in starts])


def measure(
    target: Qwen3MoeForCausalLM, draft: Draft, hot: Tensor, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, Any]:
    """Return mean accepted lengths, by domain and over all verify steps, after held-out prompts.

    `written` is on the target's greedy text, `on_text` on the held-out text as if the target had written it, and
    `target_on_text` the same for a draft that is the target.
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
