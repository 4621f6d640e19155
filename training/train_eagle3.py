"""Train an EAGLE-3 draft model for the small checkpoint: `python -m training.train_eagle3`.

The training unrolls the draft model over several draft steps, and each step learns the target's distribution. At the
end, the program measures the accepted length after held-out prompts.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, Qwen3MoeForCausalLM

from training.acceptance import STEPS_AHEAD, measure
from training.corpus import DOMAINS, load_corpus
from training.eagle3 import AUX_LAYERS, Draft, features
from training.export import write_config
from training.loop import Training, batch
from training.report import load
from training.tokenizer import encode

ROOT = Path(__file__).parents[1]
STEP_WEIGHT = 0.8  # weight of a step's loss, relative to the previous step
DRAFT_VOCAB = 768

CARD = """---
license: apache-2.0
---
# {name}

An EAGLE-3 draft for `qwen3-moe-tiny`, as SGLang loads it (`--speculative-algorithm EAGLE3`): {parameters:,} parameters,
bfloat16, trained by `python -m training.train_eagle3`. Tokens a verification yields at {steps} steps and top-k {topk},
its own one included (`report.json`):

| domain | on what the target writes greedily | on held-out text itself | were the draft the target |
| --- | --- | --- | --- |
{rows}

Computed from the models, without a server, after {prompts_per_domain} held-out prompts a domain
of {prompt_tokens} tokens, over {written_tokens} tokens each. The first column is what a server measures. The greedy
text of so small a model repeats itself and is easy to draft; the second column has no such help, and the third is what
the target would reach there as its own draft.
"""


def configuration(target: Qwen3MoeForCausalLM) -> LlamaConfig:
    """Return the configuration of the draft model: one Llama layer with the target's hidden size.

    The draft model's vocabulary contains only the most frequent tokens.
    """
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
    """Return the most frequent token ids in the streams, [DRAFT_VOCAB], in ascending order.

    All streams have the same weight.
    """
    shares = sum(stream.bincount(minlength=vocab_size) / len(stream) for stream in streams)
    return torch.as_tensor(shares).topk(DRAFT_VOCAB).indices.sort().values


def draft_loss(target: Qwen3MoeForCausalLM, draft: Draft, hot: Tensor, ids: Tensor) -> Tensor:
    """Return the weighted sum of the cross-entropies of all draft steps, in nats.

    Each step is compared with the target's distribution over the draft vocabulary.
    """
    with torch.no_grad():
        logits, aux = features(target, ids)
        embedded = target.model.embed_tokens(ids)
        wanted = logits[..., hot].softmax(-1)
    losses = [
        F.cross_entropy(guess.flatten(0, 1), wanted[:, step + 1 :].flatten(0, 1)) * STEP_WEIGHT**step
        for step, guess in enumerate(draft(aux, embedded, STEPS_AHEAD))
    ]
    return torch.stack(losses).sum()


def publish(folder: Path, report: dict[str, Any]) -> None:
    """Write `report.json` and the model card, which contains numbers from the report."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    columns = report["accepted_length"].values()
    rows = "\n".join(
        f"| {domain} | {' | '.join(f'{column[domain]:.2f}' for column in columns)} |" for domain in (*DOMAINS, "all")
    )
    (folder / "README.md").write_text(CARD.format(name=folder.name, rows=rows, **report))


def export_draft(draft: Draft, hot: Tensor, folder: Path) -> None:
    """Write the draft model in bfloat16, in the format that SGLang loads.

    The tensor `d2t` contains the difference between the target's id and the draft's id of each draft token.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().contiguous() for name, weight in draft.state_dict().items()}
    weights["d2t"] = hot - torch.arange(DRAFT_VOCAB)
    weights["t2d"] = torch.zeros(draft.config.vocab_size, dtype=torch.bool).index_fill(0, hot, True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(draft.config, folder)


def load_draft(folder: Path) -> tuple[Draft, Tensor]:
    """Load an exported draft model in float32. Also return the target ids of its vocabulary, [DRAFT_VOCAB]."""
    weights = load_file(folder / "model.safetensors")
    distances, _ = weights.pop("d2t"), weights.pop("t2d")
    draft = Draft(LlamaConfig.from_pretrained(folder)).eval()
    draft.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return draft, distances + torch.arange(len(distances))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=ROOT / "checkpoints/qwen3-moe-tiny")
    parser.add_argument("--out", type=Path, default=ROOT / "checkpoints/qwen3-moe-tiny-eagle3")
    parser.add_argument("--state", type=Path, default=ROOT / "build/train_eagle3/state.pt", help="to resume from")
    parser.add_argument("--steps", type=int, default=800, help="steps of 3,072 tokens")
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
    publish(options.out, measure(target, *load_draft(options.out), tokenizer, options.target))
    print((options.out / "README.md").read_text())


if __name__ == "__main__":
    main()
