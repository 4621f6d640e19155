"""The report of an exported checkpoint. It measures the model on held-out text, and writes report.json and the card."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from training.corpus import DOMAINS, STDLIB, Split, fingerprint
from training.evaluation import answer_accuracy, experts_active, losses, routed
from training.ngram import Trigram
from training.tokenizer import encode

BATCH = 16
SEPARATOR = {"python": "\n\n", "c": "\n\n", "english": "\n\n", "arithmetic": ""}
SLICE = 2048  # for a quick check, the report also contains the cross-entropy of only these first tokens

CARD = """---
license: apache-2.0
---
# {name}

{title}: {parameters:,} parameters, {experts} experts of which {top_k} run,
{layers} layers, bfloat16. Trained by `python -m training.{script}` on Python source, C headers, English documentation
and generated arithmetic of one machine, {tokens_trained_on:,} tokens in all; `heldout/` has the text it never saw, from
Python's own sources (PSF licence). All figures are measured on that text (`report.json`).

| domain | tokens | cross-entropy (nats) | trigram | below it | active experts of a batch of {batch}, by layer |
| --- | --- | --- | --- | --- | --- |
{rows}

The trigram model is interpolated Kneser-Ney, trained on the same domain's text and tuned on a third part. Mixed batches
of {batch} tokens activate {mixed} experts; uniform routing would activate {uniform:.1f}.
Held-out arithmetic answered right: {answers}. The chat template asks as that text does, `Q: 37+1 A:`, so that a
server's `/v1/chat/completions` answers sums.
"""


def load(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Load an exported model and its tokenizer. The model is in float32 and in evaluation mode."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def heldout_ids(tokenizer: PreTrainedTokenizerFast, folder: Path, domain: str) -> torch.Tensor:
    """Return the token ids of a domain's held-out text, [tokens] int64."""
    return encode(tokenizer, [(folder / "heldout" / f"{domain}.txt").read_text()])


def write_heldout(corpus: dict[str, Split], folder: Path) -> None:
    """Write the held-out documents of every domain to `heldout/<domain>.txt`.

    Python's licence is copied to the same folder if the installation contains it.
    """
    (folder / "heldout").mkdir(parents=True, exist_ok=True)
    if (STDLIB / "LICENSE.txt").exists():
        shutil.copyfile(STDLIB / "LICENSE.txt", folder / "heldout" / "LICENSE")
    for domain in DOMAINS:
        text = SEPARATOR[domain].join(document.text for document in corpus[domain].heldout)
        (folder / "heldout" / f"{domain}.txt").write_text(text)


def measure(folder: Path, corpus: dict[str, Split]) -> dict[str, Any]:
    """Measure an exported model and return the content of `report.json`.

    It contains cross-entropies in nats per token, the active experts of each layer and the share of right answers.
    """
    model, tokenizer = load(folder)
    domains, experts = {}, {}
    for domain in DOMAINS:
        split, ids = corpus[domain], heldout_ids(tokenizer, folder, domain)
        train, dev = (
            encode(tokenizer, [document.text for document in part]).numpy() for part in (split.train, split.dev)
        )
        nats, trigram = losses(model, ids)[1:], Trigram.tuned(train, dev, len(tokenizer))
        experts[domain] = routed(model, ids)
        own, bar = nats.mean().item(), trigram.losses(ids.numpy()).mean()
        domains[domain] = {
            "tokens": len(nats),
            "cross_entropy": own,
            "cross_entropy_of_slice": nats[:SLICE].mean().item(),
            "trigram_cross_entropy": bar,
            "trigram_discounts": trigram.discounts,
            "below_trigram": 1 - own / bar,
            "experts_active": experts_active(experts[domain], BATCH),
            "corpus": {
                "train": fingerprint(split.train),
                "dev": fingerprint(split.dev),
                "heldout": fingerprint(split.heldout),
            },
            "training_tokens": len(train),
        }
    num_experts = model.config.num_local_experts
    shortest = min(chosen.shape[1] for chosen in experts.values())
    mixed = torch.cat([chosen[:, :shortest] for chosen in experts.values()], 1)
    loads = torch.stack([layer.flatten().bincount(minlength=num_experts) for layer in mixed])
    load_shares = loads / mixed[0].numel()
    entropy = -(load_shares * load_shares.clamp_min(1e-12).log()).sum(1) / math.log(num_experts)
    return {
        "parameters": model.num_parameters(),
        "experts": num_experts,
        "top_k": model.config.num_experts_per_tok,
        "layers": model.config.num_hidden_layers,
        "domains": domains,
        "batch": BATCH,
        "experts_active_mixed": experts_active(mixed, BATCH),
        "experts_active_if_uniform": num_experts * (1 - (1 - model.config.num_experts_per_tok / num_experts) ** BATCH),
        "load_entropy": entropy.tolist(),
        "busiest_expert_over_mean": (load_shares.max(1).values * num_experts).tolist(),
        "arithmetic_right": answer_accuracy(model, tokenizer, (folder / "heldout/arithmetic.txt").read_text()),
    }


def publish(folder: Path, report: dict[str, Any], title: str, script: str) -> None:
    """Write `report.json` and the model card. The card begins with `title` and contains numbers from the report."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")

    def show(counts: list[float]) -> str:
        return " ".join(f"{count:.1f}" for count in counts)

    rows = [
        f"| {domain} | {figures['tokens']:,} | {figures['cross_entropy']:.3f} | {figures['trigram_cross_entropy']:.3f} "
        f"| {figures['below_trigram']:.1%} | {show(figures['experts_active'])} |"
        for domain, figures in report["domains"].items()
    ]
    answers = ", ".join(f"`{operator}` {share:.0%}" for operator, share in report["arithmetic_right"].items())
    card = CARD.format(
        name=folder.name,
        title=title,
        script=script,
        rows="\n".join(rows),
        mixed=show(report["experts_active_mixed"]),
        uniform=report["experts_active_if_uniform"],
        answers=answers,
        **{key: report[key] for key in ("parameters", "experts", "top_k", "layers", "batch", "tokens_trained_on")},
    )
    (folder / "README.md").write_text(card)
