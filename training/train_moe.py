"""Train the small Qwen3-MoE checkpoint on text of this machine: `python -m training.train_moe`.

Every few minutes the model is exported, ready to serve, and the training state saved: run again to resume. The end of
the run measures the model on its held-out text and writes the report and the model card beside it.
"""

from __future__ import annotations

import argparse
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from training.corpus import DOMAINS, load_corpus
from training.export import export, untied
from training.loop import CONTEXT, SEQUENCES, Training, batch
from training.report import measure, publish, write_heldout
from training.tokenizer import encode, train_tokenizer

ROOT = Path(__file__).parents[1]
VOCAB, LONGEST = 1024, 2048
BALANCE = 0.02
MIX = (*DOMAINS, "arithmetic")  # twice: its answers take more practice than text does


def configuration() -> Qwen3MoeConfig:
    """64 experts of which 8 run, 4 layers, 3.7 million parameters; head size 64, as GPU attention kernels want it."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
    )


def new_model() -> Qwen3MoeForCausalLM:
    """An untrained model in float32, the same every time."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(configuration()).float()
    model.set_experts_implementation("grouped_mm")  # transformers' default loops over the experts
    return model


def balance_loss(router_logits: tuple[Tensor, ...], top_k: int) -> Tensor:
    """Switch Transformer's load-balancing loss (Fedus et al., 2021), 1 at uniform load, averaged over the layers.

    `router_logits` are [tokens, experts] each. transformers' own pools the layers first, and lets a dozen experts of
    each layer die.
    """
    losses = []
    for logits in router_logits:
        shares = logits.softmax(-1)
        chosen = torch.zeros_like(shares).scatter(1, logits.topk(top_k).indices, 1.0 / top_k)
        losses.append(shares.shape[1] * (chosen.mean(0) * shares.mean(0)).sum())
    return torch.stack(losses).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "checkpoints/qwen3-moe-tiny")
    parser.add_argument("--state", type=Path, default=ROOT / "build/train_moe/state.pt", help="to resume from")
    parser.add_argument("--steps", type=int, default=1600, help="of 3,840 tokens")
    options = parser.parse_args()

    corpus = load_corpus()
    texts = {domain: [document.text for document in corpus[domain].train] for domain in DOMAINS}
    tokenizer = train_tokenizer(chain.from_iterable(texts.values()), VOCAB, LONGEST)
    write_heldout(corpus, options.out)
    streams = {domain: encode(tokenizer, texts[domain]) for domain in DOMAINS}
    print("training tokens:", {domain: len(stream) for domain, stream in streams.items()}, flush=True)
    model = new_model()

    def loss(draw: torch.Generator) -> Tensor:
        ids = batch([streams[domain] for domain in MIX], draw)
        output = model(ids, output_router_logits=True)
        nats = cross_entropy(output.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        return nats + BALANCE * balance_loss(output.router_logits, model.config.num_experts_per_tok)

    for step in Training(model, loss, options.steps, options.state).run():
        export(untied(model).bfloat16(), tokenizer, options.out)
        print(f"step {step}: exported to {options.out}", flush=True)
    seen = {"steps": options.steps, "tokens_trained_on": options.steps * SEQUENCES * CONTEXT}
    publish(options.out, seen | measure(options.out, corpus), Path(__file__).stem)
    print((options.out / "README.md").read_text())


if __name__ == "__main__":
    main()
