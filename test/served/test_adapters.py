"""LoRA: adapters of the attention beside requests without one. Upstream's CPU path has none for experts.

Seven requests at once are vanilla, eight run at full budget, sixteen at one that drops experts.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from served import host
from served.answers import LAYERS, generate_together, make_server, policy, read_all, read_prompts
from served.eagle import select_again
from served.release import LATEST

OFF, FULL, BUDGET = 7, 8, 16
RANK = 8
PLAN = {"policy": "xshare", "k0": 1, "add": 8}
FLAGS = policy(
    "xshare", k0=1, add=8, by_rows={str(OFF): {"policy": "vanilla"}, str(FULL): {"add": 64, "utility": "full"}}
)


def make_adapter(model: Path, folder: Path) -> None:
    """Write a random one, as PEFT does, large enough to change answers."""
    config = json.loads((model / "config.json").read_text())
    width, heads = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": config["num_attention_heads"] * heads, "v_proj": config["num_key_value_heads"] * heads}
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(LAYERS):
        for name, size in outputs.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, width, generator=generator) * width**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size, RANK, generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(outputs), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(written))


@pytest.mark.long
def test_requests_with_and_without_an_adapter_share_a_batch_that_selects(tiny_model, patched_release, tmp_path):
    make_adapter(tiny_model, tmp_path / "adapter")
    host.install(tmp_path)
    flags = (*FLAGS, "--lora-paths", f"adapter={tmp_path / 'adapter'}", "--lora-backend", "torch_native")
    server, probe, _ = make_server(tiny_model, patched_release(LATEST), flags, tmp_path)
    prompts = read_prompts(tiny_model)

    def generate(size: int, adapter: str | None) -> list[list[int]]:
        """Every other request with the adapter."""
        paths = [adapter if number % 2 else None for number in range(size)]
        answers = generate_together(server, probe, prompts[:size], lora_path=paths)
        return [answer["output_ids"] for answer in answers]

    with server:
        bare = generate(OFF, None)
        vanilla, full, _ = (generate(size, "adapter") for size in (OFF, FULL, BUDGET))
        records, metrics = read_all(server, probe)
    assert full[:OFF] == vanilla
    assert vanilla[::2] == bare[::2], "requests without an adapter"
    assert all(one != other for one, other in zip(vanilla[1::2], bare[1::2], strict=True)), "the adapter matters"
    calls = [call for call in records if call["mode"] == "DECODE" and call["rows"] in (FULL, BUDGET)]
    for call in calls:
        assert call["active"] == select_again(call, PLAN if call["rows"] == BUDGET else {**PLAN, "add": 64})
    assert metrics["steps policy"] == len(calls) / LAYERS
    assert metrics["experts_after_total"] == sum(call["after"] for call in calls)
