"""Drafts of a Mixture-of-Experts model, of a target's own layer (multi-token prediction), and of an assistant that
reads the target's keys and values: verification selects, a draft never does.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralConfig, MixtralForCausalLM

from benchmark.common.speculative import speculative_flags
from served import gemma, host
from served.answers import LAYERS, NEW_TOKENS, ask, greedy, install_plugin, make_server, policy, read_all, read_tokens
from served.eagle import DRAFT_TOKENS, check_verified, select_again
from served.families import answer, draw_prompts, make, read_routers
from served.family import EXPERTS, FAMILIES
from served.probe import read_logits
from served.release import LATEST
from sglang_xshare import Batch, build_plan, select

pytestmark = pytest.mark.long
PLAN = {"k0": 1, "add": 0, "add_per_request": 4}
FULL, BUDGET = 4, 16
"""Requests at once: whose experts no budget cuts, and those of a budget."""
WIDE = {"k0": 1, "add": EXPERTS, "utility": "full"}


def test_experts_of_a_draft_are_left_alone(tiny_model, patched_release, tmp_path):
    """STANDALONE: a random Mixtral with the target's vocabulary, since upstream takes a Qwen3-MoE draft for a layer of
    the target's. Hardly a token of it is accepted; what matters is how it routes.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "num_local_experts": 16, "num_experts_per_tok": 8, "vocab_size": 1024}
    config = MixtralConfig(**sizes, max_position_embeddings=2048, bos_token_id=None, eos_token_id=0)
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(tmp_path / "draft")
    flags = (*speculative_flags(tmp_path / "draft", algorithm="STANDALONE"), *policy("xshare", **PLAN))
    answers = ask(tiny_model, patched_release(LATEST), flags, tmp_path)
    drafted = [call for call in answers.records if call["mode"].endswith("_DRAFT")]
    assert {call["layer"] for call in drafted} == {0, 1}
    assert max(call["rows"] for call in drafted) >= 16
    assert all(call["after"] == call["before"] for call in drafted)
    verified = answers.calls("TARGET_VERIFY")
    assert all(call["active"] == select_again(call, {"policy": "xshare", **PLAN}, DRAFT_TOKENS) for call in verified)
    check_counts(answers.metrics, verified, LAYERS)


def check_counts(metrics, verified, layers):
    """Every verification is counted, and nothing else: a draft's layer is none of the policy's."""
    assert metrics["steps policy"] == len(verified) / layers > 0
    assert metrics["layer_steps_total"] == len(verified)
    assert metrics["experts_after_total"] == sum(call["after"] for call in verified)


def list_flags(plan, wide, *more):
    """Return flags of a policy that drops no expert at few requests, with NEXTN drafts, for a random model."""
    drafting = speculative_flags("itself", 1, 3, DRAFT_TOKENS, algorithm="NEXTN")  # which the flags below may name
    drafting = tuple(flag for flag in drafting if flag not in ("--speculative-draft-model-path", "itself"))
    return (*policy("xshare", **plan, by_rows={f"1-{FULL * DRAFT_TOKENS}": wide}), *drafting, *more)


def generate(server, prompts, **more):
    return server.generate(prompts, more, max_new_tokens=NEW_TOKENS, ignore_eos=True)


def append_draft(folder, layers, width):
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


def test_verification_of_a_models_own_draft_selects(tiny_model, patched_release, tmp_path):
    family = replace(FAMILIES["GLM-4-MoE"], published={"num_nextn_predict_layers": 1})
    model = make(family, tmp_path / "model")
    append_draft(tmp_path / "model", model.config.num_hidden_layers, model.config.hidden_size)
    prompts, routers = draw_prompts(model.config.vocab_size, BUDGET), read_routers(family, model)
    host.install(tmp_path)
    wide = {"add_per_request": EXPERTS, "utility": "full"}
    flags = list_flags(PLAN, wide, "--tokenizer-path", str(tiny_model))
    server, probe, _ = make_server(tmp_path / "model", patched_release(LATEST), flags, tmp_path)
    with server:
        full, budget = (generate(server, prompts[:size]) for size in (FULL, BUDGET))
        records, metrics = read_all(server, probe, first_layer=1)
    assert read_tokens(full) == answer(model, prompts[:FULL])
    assert all(one["meta_info"]["spec_verify_ct"] > 0 for one in budget)
    verified = [call for call in records if call["mode"] == "TARGET_VERIFY"]
    check_verified(verified, routers, lambda call: (PLAN | (wide if call["requests"] <= FULL else {}), None))
    check_counts(metrics, verified, len(routers))
    assert max(call["rows"] for call in records if call["mode"].endswith("_DRAFT")) >= BUDGET


def test_an_assistant_drafts_for_gemma_4_and_drafts_count_by_their_depth(
    tiny_model, patched_release, pristine_release, tmp_path
):
    """FROZEN_KV_MTP. Few requests, exact ones, and those after a switch to vanilla are answered as by SGLang as it is
    published, without speculation.
    """
    plan = {"k0": 1, "add": 8, "acceptance": 0.5, "warm_rows": 1}
    model = gemma.write_models(tmp_path)
    prompts, routers = draw_prompts(model.config.vocab_size, BUDGET), read_routers(gemma.GEMMA, model)
    tokenizer, target = ("--tokenizer-path", str(tiny_model)), tmp_path / "target"
    plain, _, _ = make_server(target, pristine_release(LATEST), (*gemma.PLAIN, *tokenizer), tmp_path / "plain")
    with plain:
        pristine = read_tokens(generate(plain, prompts))
    draft = ("--speculative-draft-model-path", str(tmp_path / "draft"))
    flags = list_flags(plan, WIDE | {"acceptance": 1.0, "warm_rows": None}, *gemma.PLAIN, *draft, *tokenizer)
    host.install(tmp_path)
    install_plugin(tmp_path, gemma.PLUGIN)
    server, probe, _ = make_server(target, patched_release(LATEST), flags, tmp_path)
    with server:
        full, budget = (generate(server, prompts[:size]) for size in (FULL, BUDGET))
        records, metrics = read_all(server, probe)
        exactly = greedy(NEW_TOKENS, custom_params={"expert_policy": "exact"})
        mixed = generate(server, prompts, sampling_params=[exactly, greedy(NEW_TOKENS)] * (BUDGET // 2))
        server.post("/expert_policy", {"policy": "vanilla"})
        off = generate(server, prompts)
    assert read_tokens(full) == pristine[:FULL]
    assert read_tokens(off) == pristine
    assert read_tokens(mixed)[::2] == pristine[::2]
    assert read_tokens(budget) != pristine
    for one in (said["meta_info"] for said in budget):
        assert one["expert_policy"]["steps"] == one["expert_policy"]["of"] == one["spec_verify_ct"] > 0
    assert [one["meta_info"]["expert_policy"].get("exact", False) for one in mixed] == [True, False] * (BUDGET // 2)
    assert {one["meta_info"]["expert_policy"]["steps"] for one in (*off, *mixed[::2])} == {0}

    verified = [call for call in records if call["mode"] == "TARGET_VERIFY"]
    depth = torch.arange(DRAFT_TOKENS, dtype=torch.int32)

    def choose(call, acceptance=0.5):
        is_full = call["requests"] <= FULL
        return (WIDE, None) if is_full else (plan | {"acceptance": acceptance}, depth.repeat(call["requests"]))

    differing = 0
    for call, chosen in zip(verified, check_verified(verified, routers, choose), strict=True):
        keys, depths = choose(call, acceptance=1.0)
        batch, even_plan = Batch(tokens_per_request=DRAFT_TOKENS, depth=depths), build_plan("xshare", **keys)
        even = select(read_logits(call), even_plan, routers[call["layer"]], batch, backend="reference")
        differing += not torch.equal(chosen.active, even.active)
    assert differing > 0, "depth decides something"
    check_counts(metrics, verified, len(routers))
