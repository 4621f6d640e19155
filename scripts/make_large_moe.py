"""Make the large random Qwen3-MoE for speed: `python -m scripts.make_large_moe [FOLDER]`, left alone where it exists.

Loading experts dominates its decode steps on a CPU as it does a production model's on a GPU. Its text is noise, its
routing is not: router weights are scaled to logits as spread as a trained router's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from training.export import export

ROOT = Path(__file__).parents[1]
TOKENIZER = ROOT / "checkpoints/qwen3-moe-tiny"
ROUTER_LOGIT_SPREAD = 2.0  # standard deviation


def configuration(vocab_size: int) -> Qwen3MoeConfig:
    """128 experts of which 8 run, hidden 1024, expert width 512, 4 layers: 820 million parameters, 1.6 GB."""
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        dtype=torch.bfloat16,
    )


def make(folder: Path, config: Qwen3MoeConfig | None = None, seed: int = 0) -> bool:
    """Write the checkpoint into `folder` at once, never half; false where it was there already."""
    if folder.exists():
        return False
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM._from_config(config or configuration(len(tokenizer)), dtype=torch.bfloat16)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=ROUTER_LOGIT_SPREAD * model.config.hidden_size**-0.5)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        export(model, tokenizer, Path(scratch) / folder.name)
        (Path(scratch) / folder.name).rename(folder)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "build/models/qwen3-moe-large")
    folder = parser.parse_args().folder
    started = time.monotonic()
    made = make(folder)
    print(f"{folder}: {f'made in {time.monotonic() - started:.0f} s' if made else 'there already'}")


if __name__ == "__main__":
    main()
