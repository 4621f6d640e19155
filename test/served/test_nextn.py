"""A model that drafts with a layer of its own (multi-token prediction): verification selects, its draft never does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmark.common.speculative import speculative_flags
from served import host
from served.answers import NEW_TOKENS, make_server, policy, read_all
from served.eagle import DRAFT_TOKENS, check_verified
from served.families import answer, make, read_routers
from served.family import EXPERTS
from served.family_table import FAMILIES
from served.release import LATEST

FAMILY = replace(FAMILIES["GLM-4-MoE"], published={"num_nextn_predict_layers": 1})
# SGLang finds the draft in the checkpoint itself.
DRAFTING = speculative_flags("itself", 1, 3, DRAFT_TOKENS, algorithm="NEXTN")
DRAFTING = tuple(flag for flag in DRAFTING if flag not in ("--speculative-draft-model-path", "itself"))
FULL, BUDGET = 4, 16
"""Requests at once."""
PLAN = {"k0": 1, "add": 0, "add_per_request": 4}
FLAGS = policy("xshare", **PLAN, by_rows={f"1-{FULL * DRAFT_TOKENS}": {"add_per_request": EXPERTS, "utility": "full"}})


def append_draft(folder: Path, layers: int, width: int) -> None:
    """Add a draft layer to a checkpoint, as GLM's have it: behind the others, here a copy of the last."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    last, draft = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    tensors |= {name.replace(last, draft): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    tensors |= {f"{draft}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{draft}eh_proj.weight"] = torch.eye(width).repeat(1, 2)
    tensors[f"{draft}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{draft}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.long
def test_verification_of_a_models_own_draft_selects(tiny_model, patched_release, tmp_path):
    model = make(FAMILY, tmp_path / "model")
    config = model.config
    append_draft(tmp_path / "model", config.num_hidden_layers, config.hidden_size)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, config.vocab_size, (BUDGET, 8), generator=generator).tolist()
    flags = (*FLAGS, "--tokenizer-path", str(tiny_model), *DRAFTING)
    host.install(tmp_path)
    server, probe, _ = make_server(tmp_path / "model", patched_release(LATEST), flags, tmp_path)
    with server:
        full, budget = (
            server.generate(prompts[:size], max_new_tokens=NEW_TOKENS, ignore_eos=True) for size in (FULL, BUDGET)
        )
        records, metrics = read_all(server, probe, first_layer=1)
    assert [one["output_ids"] for one in full] == answer(model, prompts[:FULL])
    assert all(one["meta_info"]["spec_verify_ct"] > 0 for one in budget)

    routers = read_routers(FAMILY, model)
    verified = [call for call in records if call["mode"] == "TARGET_VERIFY"]
    full = {**PLAN, "add_per_request": EXPERTS}
    check_verified(verified, routers, lambda call: (full if call["requests"] <= FULL else PLAN, None))
    assert metrics["steps policy"] == len(verified) / len(routers) > 0
    assert metrics["experts_after_total"] == sum(call["after"] for call in verified)

    drafted = [call for call in records if call["mode"].endswith("_DRAFT")]
    assert max(call["rows"] for call in drafted) >= BUDGET
    assert metrics["layer_steps_total"] == len(verified), "a draft's layer is none of the policy's"
