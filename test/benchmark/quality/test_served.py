"""The server and the replay in transformers are two ways to the same figure: each checks the other."""

import json

import pytest
import torch

from benchmark.common.record import read_record
from benchmark.common.variant import parse_plan
from benchmark.quality.__main__ import main
from benchmark.quality.instrument import Instrument, Verifier
from benchmark.quality.model import Layout, load_model, prefill
from benchmark.quality.served import SERVER_ARGS
from benchmark.quality.text import load_sequences
from served.eagle import eagle
from sglang_xshare.tune.measure import check_rows
from sglang_xshare.tune.texts import Sample

PROMPT = 32
FLAGS = ("--dtype", "float32", "--expert-policy", "observe", *SERVER_ARGS)
COUNTS = ("--per-domain", "8", "--batch", "8", "--prompt", "24", "--steps", "16")
POLICIES = ("xshare:k0=1,add=4", "oea:k0=3")


@pytest.mark.long
def test_the_record_of_a_server_is_that_of_an_offline_decode(servers, tiny_model, tmp_path):
    server = servers(*FLAGS)
    arguments = [*COUNTS, "--top", "1024", *POLICIES]  # the whole vocabulary: divergence is exact
    main([*arguments, "--url", server.url, "--texts", str(tiny_model / "heldout"), "--out", str(tmp_path / "served")])
    main([*arguments, "--model", str(tiny_model), "--out", str(tmp_path / "offline")])
    served, offline = (read_record(tmp_path / name / "quality.json")["points"] for name in ("served", "offline"))
    assert list(served) == list(offline) == ["vanilla", *POLICIES]
    for policy, batches in ((policy, batches) for policy in served for batches in ("one_domain", "mixed")):
        ours, theirs = served[policy][batches], offline[policy][batches]
        assert ours["loss"].keys() == theirs["loss"].keys()
        for domain, loss in ours["loss"].items():
            assert loss == pytest.approx(theirs["loss"][domain], abs=2e-4)
        assert ours["divergence"] == pytest.approx(theirs["divergence"], abs=2e-4)
        assert ours["agreement"] == pytest.approx(theirs["agreement"], abs=2e-3)
        # A server may run a step more than is asked of it, of rows that have all they want.
        assert ours["active_experts"] == pytest.approx(theirs["active_experts"], rel=0.02)
        assert ours["kept_mass"] == pytest.approx(theirs["kept_mass"], abs=0.01)
    assert served["vanilla"]["mixed"]["answers_right"] >= served["vanilla"]["mixed"]["answers"] / 2
    assert served[POLICIES[0]]["mixed"]["divergence"]["nats"] > 0.01
    assert Instrument(server.url).get_policy()["policy"] == "observe"


@pytest.mark.long
def test_prompts_of_one_s_own(servers, tmp_path):
    """python -m benchmark.quality --url http://localhost:30000 --prompts prompts.jsonl oea:k0=3"""
    file, server = tmp_path / "prompts.jsonl", servers(*FLAGS)
    sums = [(f"Q: {n}+5 A: {n + 5}\nQ: {n}+9 A:", f" {n + 9}\n") for n in range(20, 36)]
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt, answer in sums))
    arguments = ["--prompts", str(file), "--per-domain", "8", "--batch", "8", "--steps", "8", "--out", str(tmp_path)]
    main(["--url", server.url, *arguments, "xshare:k0=1,add=8", "oea:k0=3"])
    points = read_record(tmp_path / "quality.json")["points"]
    vanilla, policy = points["vanilla"]["mixed"], points["oea:k0=3"]["mixed"]
    assert vanilla["answers"] == policy["answers"] == 8
    assert vanilla["answers_right"] >= 6
    # The texts are its own greedy answers: what it likes best of all.
    assert vanilla["loss"]["prompts"]["cross_entropy"] < policy["loss"]["prompts"]["cross_entropy"]
    assert vanilla["kept_mass"] == 1 > policy["kept_mass"]


@pytest.mark.long
def test_verified_text_loses_what_a_step_after_a_prefill_loses(servers, tiny_model, tmp_path):
    """Of a policy that looks at single rows: what else is verified beside them, drafts, does not show in it."""
    server = servers(*FLAGS, *eagle(tiny_model))
    asked, model, plan = Verifier(server.url), load_model(tiny_model), parse_plan("pruned:k0=1")
    tokens = load_sequences(tiny_model / "heldout", tiny_model, PROMPT + 9, per_domain=2).tokens
    asked.set_policy({"policy": "pruned", "k0": 1})
    asked.flush()
    forced = asked.verify([Sample(one[:PROMPT].tolist(), one[PROMPT:].tolist()) for one in tokens], top=1024)
    steps = []
    with torch.inference_mode():
        for place in range(PROMPT, PROMPT + 8):
            before = prefill(model, tokens[:, :place])
            steps.append(before.decode(tokens[:, place : place + 1], plan, Layout(len(tokens)))[0][:, 0].log_softmax(1))
    scores = torch.stack(steps, 1)
    nats = -scores.gather(2, tokens[:, PROMPT + 1 :, None])[..., 0]
    torch.testing.assert_close(torch.tensor([[step.nats for step in one] for one in forced]), nats, rtol=0, atol=1e-3)
    assert [[step.greedy for step in one] for one in forced] == scores.argmax(2).tolist()
    told = torch.tensor([[[step.likeliest[token] for token in range(1024)] for step in one] for one in forced])
    torch.testing.assert_close(told.exp(), scores.exp(), rtol=0, atol=1e-3)
    check_rows(asked.get_policy()["since_switch"], rows=4 * len(tokens))

    arguments = ["--url", server.url, "--texts", str(tiny_model / "heldout"), "--out", str(tmp_path)]
    main([*arguments, "--per-domain", "4", "--batch", "4", "--prompt", "24", "--steps", "6", "xshare"])
    vanilla, point = (one["mixed"] for one in read_record(tmp_path / "quality.json")["points"].values())
    assert 1 < point["accepted"] <= 4
    assert point["active_experts"] < vanilla["active_experts"]
    assert asked.get_policy()["policy"] == "pruned"
