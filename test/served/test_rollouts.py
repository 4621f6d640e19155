"""What training asks of a server under a policy: the experts that it used, which replay its log-probabilities."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial

import numpy as np
import pybase64
import pytest
import torch

from benchmark.common.server import free_port
from benchmark.quality.model import load_model
from benchmark.quality.routing import find_gates
from served import host, memory_saver
from served.answers import LAYERS, policy, say_together
from served.eagle import TOP_K, eagle
from served.families import answer as answer_as_transformers
from served.families import draw_prompts, draw_weights, make
from served.family import EXPERTS, FAMILIES
from served.load import load
from served.ranks import TWO, TWO_CORES, XSHARE
from served.release import LATEST, OLDEST, make_env
from sglang_xshare.live import PATH
from sglang_xshare.live.client import Client

TRUNCATED = {"policy": "custom", "k0": 0, "budget": 8, "coverage": "truncate", "rescue": False}
FOUR = policy(
    "xshare",
    k0=1,
    add=4,
    layers={"1": {"own_share": 0.75, "utility": "squared"}, "2": {"policy": "pruned", "k0": 2}, "3": TRUNCATED},
)
"""By layer: as published; shares of the own sum; empty slots in every row; rows that are left with no expert at all."""
OWN_SHARES = (0.0, 0.75, 0.0, 1.0)
"""What a trainer has to know of these: how far a row is divided by the sum over its own top-k, by layer."""


def read_experts(answer):
    """[tokens but the last, layers, top-k] expert ids as returned."""
    found = np.frombuffer(pybase64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    return torch.tensor(found.reshape(-1, LAYERS, TOP_K))


def read_rollout(answer):
    """(tokens of prompt and answer, the log-probabilities of all but the first)."""
    meta = answer["meta_info"]
    said = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    return [token for _, token, *_ in said], torch.tensor([found for found, *_ in said[1:]])


def weigh(ids, own_share, logits, own):
    """What a trainer makes of returned experts [rows, k], in place of its own: -1 is none, and has no weight."""
    scores = logits.softmax(-1)
    chosen = scores.gather(1, ids.clamp(min=0)) * (ids >= 0)
    whole = chosen.sum(1, keepdim=True) ** (1 - own_share) * scores.topk(TOP_K).values.sum(1, keepdim=True) ** own_share
    return ids.clamp(min=0), chosen / whole


@torch.inference_mode()
def replay(model, tokens, experts=None):
    """Return transformers' log-probabilities of all tokens but the first, by these experts or by its own routing."""
    with ExitStack() as stack:
        if experts is not None:
            for layer, gate in enumerate(find_gates(model)):
                stack.callback(gate.intercept(partial(weigh, experts[:, layer].long(), OWN_SHARES[layer])).remove)
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


PARALLEL = {"data-parallel attention": TWO, "all-to-all": (*TWO, "--moe-a2a-backend", "deepep")}


@pytest.mark.parametrize(
    ("how", "release"),
    [
        ("one rank", LATEST),
        pytest.param("one rank", OLDEST, marks=pytest.mark.long),
        *(pytest.param(how, LATEST, marks=pytest.mark.long) for how in ("EAGLE-3", *PARALLEL)),
    ],
)
def test_returned_experts_replay_the_log_probabilities(how, release, tiny_model, small_server, prompts, tmp_path):
    """Rollouts have different lengths and are drawn at temperature 1."""
    host.install(tmp_path)
    more = eagle(tiny_model) if how == "EAGLE-3" else PARALLEL.get(how, ())
    flags = (*FOUR, "--enable-return-routed-experts", *more)
    server, _, _ = small_server(*flags, release=release, env=TWO_CORES if "--tp" in flags else {})
    sampling = [{"temperature": 1.0, "max_new_tokens": 8 + 2 * n, "ignore_eos": True} for n in range(len(prompts))]
    wanted = {"return_logprob": True, "logprob_start_len": 0, "return_routed_experts": True}
    with server:
        answers = server.generate(prompts, {"sampling_params": sampling, **wanted})
    model = load_model(tiny_model)
    apart = []
    for answer in answers:
        tokens, served = read_rollout(answer)
        experts, prompt = read_experts(answer), answer["meta_info"]["prompt_tokens"]
        assert len(experts) == len(tokens) - 1
        torch.testing.assert_close(replay(model, tokens, experts), served, rtol=0, atol=1e-4)
        apart.append((replay(model, tokens) - served).abs()[prompt:].mean())
        check_slots(experts[:prompt], experts[prompt:])
    assert torch.stack(apart).mean() > 0.1, "without the experts, a trainer computes something else"


def check_slots(prefilled, decoded):
    """Prefill fills every slot; in decode one of -1 is empty, and no expert stands twice."""
    assert (prefilled >= 0).all()
    pruned = (decoded[:, 2] >= 0).sum(1) == 2  # but where the last request was left alone
    assert pruned.float().mean() > 0.5
    for row in decoded.flatten(0, 1).tolist():
        used = [expert for expert in row if expert >= 0]
        assert len(set(used)) == len(used)


OEA = {"policy": "oea", "k0": 2}
OBSERVE = {"policy": "observe", "plans": ["oea:k0=3", "xshare:k0=1,add=4"]}


def reload(server, model, **options):
    """Write every weight anew."""
    done = server.post("/update_weights_from_disk", {"model_path": str(model), **options})
    assert done["success"], done


@pytest.mark.long
def test_a_policy_outlives_released_memory(tiny_model, small_server, prompts, tmp_path, served):
    """Weights and cache are lost and written anew; counters, active policy and observed plans are kept.
    The policy is read from a file.
    """
    host.install(tmp_path)
    memory_saver.install(tmp_path)
    file = tmp_path / "policy.json"
    file.write_text('{"k0": 1, "add": 8}')
    flags = ("--expert-policy", "xshare", "--expert-policy-config", str(file), "--enable-memory-saver")
    server, probe, _ = small_server(*flags)
    expected = served("xshare").tokens[0]

    def release():
        counted = server.get(PATH)
        server.post("/release_memory_occupation", {})
        return counted

    def resume(counted):
        server.post("/resume_memory_occupation", {})
        age = {"counted_ago": None}
        assert server.get(PATH) | age == counted | age
        reload(server, tiny_model)

    with server:
        assert server.get("/server_info")["expert_policy_config"] == str(file)
        assert say_together(server, probe, prompts) == expected
        resume(release())
        assert say_together(server, probe, prompts) == expected
        server.post("/release_memory_occupation", {})
        server.post("/resume_memory_occupation", {})
        assert say_together(server, probe, prompts) != expected, "without its weights it cannot say the same"
        reload(server, tiny_model)
        for plan in (OEA, OBSERVE, XSHARE):
            release()
            told = server.post(PATH, plan)
            resume({name: told[name] for name in told if name not in ("warnings", "recaptured", "recapture_seconds")})
            said = say_together(server, probe, prompts)
            assert Client(server.url).get_policy()["since_switch"]["layer_steps"] > 0
        assert said == expected


ENGINE = """
import json, sys
from pathlib import Path
from threading import Thread
import sglang, torch
from safetensors.torch import load_file
from sglang.srt.utils import init_custom_process_group
if __name__ == "__main__":
    folders, tokenizer, prompts, flags, port = json.loads(sys.argv[1])
    weights = [load_file(Path(folder) / "model.safetensors") for folder in folders]
    engine = sglang.Engine(model_path=folders[0], tokenizer_path=tokenizer, device="cpu", dtype="float32",
        attention_backend="torch_native", cuda_graph_backend_decode="disabled", cuda_graph_backend_prefill="disabled",
        max_total_tokens=32768, log_level="error", expert_policy="xshare", **flags)
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}

    def say():
        answers = engine.generate(input_ids=prompts, sampling_params=sampling)
        print(json.dumps([answer["output_ids"] for answer in answers]), flush=True)

    said = engine.get_server_info().items()
    print(json.dumps({key: value for key, value in said if key.startswith("expert_policy")}), flush=True)

    def check(done):
        assert done[0] if isinstance(done, tuple) else done.success, done

    def update(change, *args):
        engine.begin_weight_update()
        check(change(*args))
        engine.end_weight_update()

    say()
    check(engine.update_weights_from_disk(folders[1]))
    say()
    update(engine.update_weights_from_tensor, list(weights[2].items()))
    say()

    def broadcast():
        group = init_custom_process_group(
            backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="update")
        for weight in weights[3].values():
            torch.distributed.broadcast(weight, src=0, group=group)

    sender = Thread(target=broadcast)
    sender.start()
    engine.init_weights_update_group("127.0.0.1", port, 1, 2, "update", backend="gloo")
    shapes = [list(weight.shape) for weight in weights[3].values()]
    update(engine.update_weights_from_distributed, list(weights[3]), ["float32"] * len(shapes), shapes, "update")
    sender.join()
    say()
    session = engine.open_session(capacity_of_str_len=10000)
    said = engine.generate(input_ids=prompts[0], sampling_params=sampling, session_params={"id": session})
    engine.close_session(session)
    print(json.dumps([said["output_ids"]]), flush=True)
    engine.shutdown()
"""


@pytest.mark.long
@pytest.mark.parametrize("name", ["GLM-4-MoE", "ERNIE 4.5"])
def test_a_layer_follows_updated_weights(name, tiny_model, patched_release, tmp_path):
    """Its router's bias above all, from disk, tensors, another process: answers are of the weights written last."""
    family = FAMILIES[name]
    folders = [tmp_path / f"step-{step}" for step in range(4)]
    model = make(family, folders[0])
    prompts = draw_prompts(model.config.vocab_size, 8)
    expected = [answer_as_transformers(model, prompts)]
    for step, folder in enumerate(folders[1:], 1):
        draw_weights(model, seed=step)
        model.save_pretrained(folder)
        shutil.copy(folders[0] / "config.json", folder)
        expected.append(answer_as_transformers(model, prompts))
    (tmp_path / "engine.py").write_text(ENGINE)
    flags = {"expert_policy_config": {"k0": 1, "add": EXPERTS, "utility": "full"}}
    arguments = json.dumps([[str(folder) for folder in folders], str(tiny_model), prompts, flags, free_port()])
    env = os.environ | make_env(patched_release(LATEST)) | dict(family.env)
    command = [sys.executable, str(tmp_path / "engine.py"), arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    assert [tokens == wanted for tokens, wanted in zip(said, expected, strict=False)] == [True] * 4
    assert said[4] == expected[3][:1], "a session"
    (info,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"expert_policy'))
    unset = {"trace": None, "on_disagreement": None, "ignore_client_exact": False, "draft_depth": None}
    assert info == {"expert_policy": "xshare"} | flags | {f"expert_policy_{name}": unset[name] for name in unset}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_updates_pauses_and_switches_meet_under_load(tiny_model, small_server, prompts, served):
    """No request loses a token while weights are written; paused ones go on or are prefilled anew."""
    server, probe, _ = small_server(*policy("xshare", k0=1, add=8))
    with server:
        with load(server, prompts) as answered:
            for number, plan in enumerate((OEA, OBSERVE, {"policy": "vanilla"}, XSHARE) * 3):
                mode = ("in_place", "retract")[number % 2]
                server.post("/pause_generation", {"mode": mode})
                before = server.post(PATH, plan)
                reload(server, tiny_model, flush_cache=mode == "retract")
                assert server.get(PATH)["counters"] == before["counters"], "paused"
                server.post("/continue_generation", {})
                time.sleep(0.5)
        assert sum(answered) > 0
        server.post("/flush_cache", {})
        assert say_together(server, probe, prompts) == served("xshare").tokens[0]
        assert "Scheduler hit an exception" not in server.log_text()
