"""Train the small checkpoint's EAGLE-3 draft on its own hidden states: `python -m scripts.train_eagle3`.

The draft is unrolled over its steps in training and matched to the target's distribution at each, on text and on what
the target itself writes. The end of the run measures the accepted length on continuations of held-out text.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, PreTrainedTokenizerFast, Qwen3MoeForCausalLM

from scripts.corpus import DOMAINS, load_corpus
from scripts.eagle3 import AUX_LAYERS, Draft, features
from scripts.export import write_config
from scripts.report import heldout_ids, load
from scripts.tokenizer import encode
from scripts.training import Training, batch

ROOT = Path(__file__).parents[1]
STEPS_AHEAD = 3
STEP_WEIGHT = 0.8  # of a step's loss, relative to the step before it
DRAFT_VOCAB = 768
PROMPTS, PROMPT, WRITTEN = 16, 64, 128  # a domain's held-out prompts, their length, the greedy tokens measured


def configuration(target: Qwen3MoeForCausalLM) -> LlamaConfig:
    """One Llama layer of the target's width; it shares the target's embedding and predicts its commonest tokens."""
    config = target.config
    return LlamaConfig(
        architectures=["LlamaForCausalLMEagle3"],
        hidden_size=config.hidden_size,
        intermediate_size=4 * config.hidden_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=DRAFT_VOCAB,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=config.eos_token_id,
        dtype=torch.bfloat16,
        eagle_config={"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS), "use_aux_hidden_state": True},
    )


def commonest(streams: list[Tensor], vocab_size: int) -> Tensor:
    """The DRAFT_VOCAB ids the streams use most, each stream counting the same: [DRAFT_VOCAB], ascending."""
    shares = sum(stream.bincount(minlength=vocab_size) / len(stream) for stream in streams)
    return torch.as_tensor(shares).topk(DRAFT_VOCAB).indices.sort().values


def draft_loss(target: Qwen3MoeForCausalLM, draft: Draft, hot: Tensor, ids: Tensor) -> Tensor:
    """Cross-entropy of each unrolled step against the target's distribution over the draft's tokens, in nats."""
    with torch.no_grad():
        logits, aux = features(target, ids)
        embedded = target.model.embed_tokens(ids)
        wanted = logits[..., hot].softmax(-1)
    losses = [
        F.cross_entropy(guess.flatten(0, 1), wanted[:, step + 1 :].flatten(0, 1)) * STEP_WEIGHT**step
        for step, guess in enumerate(draft(aux, embedded, STEPS_AHEAD))
    ]
    return torch.stack(losses).sum()


@torch.inference_mode()
def accepted_lengths(target: Qwen3MoeForCausalLM, draft: Draft, hot: Tensor, ids: Tensor, prompt: int) -> list[int]:
    """Tokens every verification of a chain of STEPS_AHEAD drafts yields, its own token included, as a server counts.

    `ids` [rows, tokens] are greedy continuations of prompts of `prompt` tokens: a draft is accepted where it repeats
    them, so the walk is the server's at top-k 1 and temperature 0.
    """
    _, aux = features(target, ids)
    guesses = draft(aux, target.model.embed_tokens(ids), STEPS_AHEAD)
    hits = [hot[guess.argmax(-1)] == ids[:, step + 2 :] for step, guess in enumerate(guesses)]
    lengths = []
    for row in range(len(ids)):
        place = prompt - 1
        while place < hits[-1].shape[1]:
            accepted = 0
            while accepted < STEPS_AHEAD and hits[accepted][row, place]:
                accepted += 1
            lengths.append(accepted + 1)
            place += accepted + 1
    return lengths


def continuations(target: Qwen3MoeForCausalLM, prompts: Tensor, written: int) -> Tensor:
    """What the target writes greedily after `prompts` [rows, tokens], past ends of text: [rows, tokens + written]."""
    return target.generate(
        prompts, max_new_tokens=written, min_new_tokens=written, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def spread_prompts(ids: Tensor) -> Tensor:
    """PROMPTS stretches of PROMPT ids, evenly spread over `ids` [tokens]: [PROMPTS, PROMPT]."""
    starts = torch.linspace(0, len(ids) - PROMPT, PROMPTS).long()
    return torch.stack([ids[start : start + PROMPT] for start in starts])


def measure(
    target: Qwen3MoeForCausalLM, draft: Draft, hot: Tensor, tokenizer: PreTrainedTokenizerFast, folder: Path
) -> dict[str, Any]:
    """Mean accepted length on greedy continuations of held-out text, by domain and over all verifications."""
    domains, everything = {}, []
    for domain in DOMAINS:
        prompts = spread_prompts(heldout_ids(tokenizer, folder, domain))
        lengths = accepted_lengths(target, draft, hot, continuations(target, prompts, WRITTEN), PROMPT)
        domains[domain] = sum(lengths) / len(lengths)
        everything += lengths
    return {
        "steps": STEPS_AHEAD,
        "topk": 1,
        "prompts_per_domain": PROMPTS,
        "prompt_tokens": PROMPT,
        "written_tokens": WRITTEN,
        "accepted_length": sum(everything) / len(everything),
        "accepted_length_by_domain": domains,
        "parameters": sum(parameter.numel() for parameter in draft.parameters()),
    }


def export_draft(draft: Draft, hot: Tensor, folder: Path) -> None:
    """Write the draft in bfloat16 as SGLang loads it; `d2t` holds each draft id's distance to its target id."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().contiguous() for name, weight in draft.state_dict().items()}
    weights["d2t"] = hot - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.zeros(draft.config.vocab_size, dtype=torch.bool).index_fill(0, hot, True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(draft.config, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "checkpoints/qwen3-moe-tiny")
    parser.add_argument("--out", type=Path, default=ROOT / "checkpoints/qwen3-moe-tiny-eagle3")
    parser.add_argument("--state", type=Path, default=ROOT / "build/train_eagle3/state.pt", help="to resume from")
    parser.add_argument("--steps", type=int, default=600, help="of 3,072 tokens")
    options = parser.parse_args()

    target, tokenizer = load(options.target)
    target.set_experts_implementation("grouped_mm")
    corpus = load_corpus()
    streams = [encode(tokenizer, [document.text for document in corpus[domain].train]) for domain in DOMAINS]
    hot = commonest(streams, len(tokenizer))
    torch.manual_seed(0)
    draft = Draft(configuration(target))

    def loss(draw: torch.Generator) -> Tensor:
        return draft_loss(target, draft, hot, batch(streams, draw))

    for step in Training(draft, loss, options.steps, options.state).run():
        export_draft(draft, hot, options.out)
        print(f"step {step}: exported to {options.out}", flush=True)
    report = measure(target, draft.bfloat16().float(), hot, tokenizer, options.target)
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
