"""A pruned checkpoint in the unpatched server."""

import pytest

from benchmark.common.server import Server
from benchmark.quality.model import load_model
from prune.static import draw_orders, generate, static, write_orders
from served.answers import NEW_TOKENS, read_prompts
from served.release import LATEST, make_env
from sglang_xshare.cli import main

KEEP = 32


@pytest.mark.long
def test_the_unpatched_server_answers_as_the_static_ranking(tiny_model, pristine_release, tmp_path):
    orders, prompts = draw_orders(), read_prompts(tiny_model)
    words = ["--model", tiny_model, "--order", write_orders(tmp_path / "o", orders), "--out", tmp_path / "pruned"]
    assert main(["prune", *map(str, words), "--keep", str(KEEP)]) == 0
    whole = load_model(tiny_model)
    with static(whole, orders, KEEP):
        wanted, _ = generate(whole, tiny_model, prompts, NEW_TOKENS)
    env = {"PYTHONPATH": make_env(pristine_release(LATEST))["PYTHONPATH"]}
    with Server(tmp_path / "pruned", ["--dtype", "float32"], env=env, name="pruned") as server:
        answers = server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert [answer["output_ids"] for answer in answers] == wanted
