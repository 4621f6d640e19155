"""The server and the replay in transformers are two ways to the same figure: each checks the other."""

import json

import torch

from benchmark.common.variant import parse_plan
from benchmark.quality.measure import Bench
from benchmark.quality.model import Layout, load_model
from benchmark.quality.served import SERVER_ARGS, measure_nats
from benchmark.quality.text import load_sequences

PROMPT, STEPS, BATCH = 32, 32, 16


def test_a_policy_costs_in_the_server_what_it_costs_here(servers, tiny_model):
    keys = {"k0": 1, "add": 4}
    policy = ("--expert-policy", "xshare", "--expert-policy-config", json.dumps(keys))
    texts = load_sequences(tiny_model / "heldout", tiny_model, PROMPT + STEPS + 1, per_domain=BATCH // 4)
    mixed = texts.take(texts.mixing())
    bench = Bench(load_model(tiny_model), mixed, PROMPT)
    here, vanilla = (bench.run(parse_plan(plan), Layout(BATCH)).nats for plan in ("xshare:k0=1,add=4", "vanilla"))
    served = measure_nats(servers("--dtype", "float32", *policy, *SERVER_ARGS), mixed.tokens, PROMPT, BATCH)
    torch.testing.assert_close(served, here, rtol=0, atol=1e-3)
    assert (served - vanilla).abs().mean() > 0.01
