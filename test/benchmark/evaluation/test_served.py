"""The harness through a real server, policy off and on: what `make eval TASKS=arithmetic_domain` runs.

The following commands are the same one on other data:
`make eval TASKS=gsm8k`, `make eval PYTHON=python TASKS=gsm8k URL=http://localhost:30000`, and
`make eval TASKS="gsm8k ifeval" URL=http://localhost:30000 EVAL_ARGS="--chat --policies off xshare:k0=1,add=24 xshare:k0=1,add=12,utility=squared,own_share=0.75"`.
"""  # noqa: E501 - the command as the page has it

import json
import subprocess
import sys

import pytest

from benchmark.common.paths import ROOT, TRAINED
from benchmark.common.server import Server
from benchmark.evaluation import __main__ as command
from benchmark.evaluation.harness import Harness
from sglang_xshare.live.client import Client

pytestmark = pytest.mark.long
ON = "xshare:k0=1,add=4"


@pytest.fixture(scope="module", autouse=True)
def harness_is_there():
    """As `make eval` installs it."""
    subprocess.run(["make", "harness", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)


def test_off_and_on_by_live_control_on_a_running_server(tmp_path):
    local = [command.LOCAL, "--policies", "off", ON, "--limit", "32", "--out", str(tmp_path)]
    with Server(TRAINED, ["--expert-policy", "xshare:k0=1,add=6"]) as server:
        command.main([*local, "--url", server.url])
        client = Client(server.url)
        assert client.get_policy()["add"] == 6, "it has the policy again that it had"
        switches = client.get_policy()["switches"]
        command.main([*local, "--url", server.url, "--resume"])
        assert client.get_policy()["switches"] == switches, "the record had everything"
    off, on = json.loads((tmp_path / "evaluation.json").read_text())["points"].values()
    assert (off["policy"], off["experts_after"], off["policy_steps"]) == ("off", None, 0)
    assert on["policy"] == ON
    assert on["policy_steps"] > 0
    assert on["experts_after"] < on["experts_before"] <= 64
    assert 0.5 < on["kept_mass"] < 1
    for arm in (off, on):
        (score,) = arm["scores"]
        assert (score["task"], score["name"], len(score["documents"])) == (command.LOCAL, "exact_match, number", 32)
        assert arm["tokens"] >= 2 * 32, "a number and the end of its line"
    assert off["scores"][0]["value"] >= 0.9


def test_a_task_that_tells_nothing_is_one_line(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"text": "a", "right": "b"}\n')
    (tmp_path / "choices.yaml").write_text(
        "task: choices\ndataset_path: json\ntest_split: train\noutput_type: multiple_choice\ndoc_to_text: text\n"
        f"doc_to_target: right\ndoc_to_choice: ['b', 'c']\ndataset_kwargs: {{data_files: {tmp_path / 'data.jsonl'}}}\n"
    )
    with pytest.raises(ValueError, match="got multiple_choice, which is scored in prefill, where no policy selects"):
        Harness([str(tmp_path / "choices.yaml")])
