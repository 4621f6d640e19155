"""A pruned checkpoint in the unpatched server, and what it would cost on a server of the whole one.

docs/prune.md: `sglang serve --model-path build/pruned`,
`sglang-xshare policy set http://localhost:30000 moe-spec --config build/pruned/moe-spec.json`.
"""

from pathlib import Path

import pytest
import requests

from benchmark.common.server import Server
from benchmark.quality.model import load_model
from prune.static import draw_orders, generate, static, write_orders
from served.answers import NEW_TOKENS, read_prompts
from served.release import LATEST, make_env
from sglang_xshare.cli import main
from sglang_xshare.live import PATH
from sglang_xshare.prune.checkpoint import ORDERS

KEEP = 32


@pytest.fixture
def orders() -> list[list[int]]:
    return draw_orders()


@pytest.fixture
def pruned(orders, tiny_model, tmp_path) -> Path:
    words = ["--model", tiny_model, "--order", write_orders(tmp_path / "o", orders), "--out", tmp_path / "pruned"]
    assert main(["prune", *map(str, words), "--keep", str(KEEP)]) == 0
    return tmp_path / "pruned"


@pytest.mark.long
def test_the_unpatched_server_answers_as_the_static_ranking(orders, pruned, tiny_model, pristine_release):
    prompts = read_prompts(tiny_model)
    whole = load_model(tiny_model)
    with static(whole, orders, KEEP):
        wanted, _ = generate(whole, tiny_model, prompts, NEW_TOKENS)
    env = {"PYTHONPATH": make_env(pristine_release(LATEST))["PYTHONPATH"]}
    with Server(pruned, ["--dtype", "float32"], env=env, name="pruned") as server:
        answers = server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    assert [answer["output_ids"] for answer in answers] == wanted


@pytest.mark.long
def test_a_server_of_the_whole_model_takes_its_orders(pruned, tiny_model, servers, patched_release):
    server = servers("--expert-policy", "observe", "--dtype", "float32", release=patched_release(LATEST))
    former = server.get(PATH)
    assert main(["policy", "set", server.url, "moe-spec", "--config", str(pruned / ORDERS)]) == 0
    server.generate(read_prompts(tiny_model), max_new_tokens=NEW_TOKENS, ignore_eos=True)
    since = server.get(PATH)["since_switch"]
    assert since["outcomes"]["policy"] > 0
    assert 8 <= since["mean_after"] <= KEEP < since["mean_before"]
    assert requests.post(server.url + PATH, json=former, timeout=60).ok
