"""The same policy from Python and from the command line."""

import json
import subprocess
import sys

import pytest

from served.answers import NEW_TOKENS, ask, make_server, read_prompts
from served.release import LATEST

ENGINE = """
import json, sys
import sglang
if __name__ == "__main__":
    model, prompts, new_tokens = json.loads(sys.argv[1])
    engine = sglang.Engine(
        model_path=model, device="cpu", attention_backend="torch_native", cuda_graph_backend_decode="disabled",
        cuda_graph_backend_prefill="disabled", max_total_tokens=32768, dtype="float32", log_level="error",
        expert_policy="pruned", expert_policy_config={"k0": 2},
    )
    sampling = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    tokens = [answer["output_ids"] for answer in engine.generate(prompts, sampling)]
    info = {key: value for key, value in engine.get_server_info().items() if key.startswith("expert_policy")}
    print(json.dumps({"tokens": tokens, "info": info}), flush=True)
    engine.shutdown()
"""


@pytest.mark.long
def test_engine_and_file_say_the_same(tiny_model, patched_release, tmp_path, served):
    """A dict and a file; under pruned, whose answers do not depend on how requests are batched."""
    file = tmp_path / "policy.json"
    file.write_text('{"k0": 2}')
    tree = patched_release(LATEST)
    flags = ("--expert-policy", "pruned", "--expert-policy-config", str(file))
    answers = ask(tiny_model, tree, flags, tmp_path, sizes=(16,))
    assert answers.info["expert_policy"] == "pruned"
    assert answers.info["expert_policy_config"] == str(file)
    assert answers.tokens[0] != served("unpatched").tokens[0]

    (tmp_path / "engine.py").write_text(ENGINE)
    argument = json.dumps([str(tiny_model), read_prompts(tiny_model), NEW_TOKENS])
    env = make_server(tiny_model, tree, (), tmp_path / "engine")[0].env
    command = [sys.executable, str(tmp_path / "engine.py"), argument]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"tokens"')))
    assert said["tokens"] == answers.tokens[0]
    assert said["info"] == {
        "expert_policy": "pruned",
        "expert_policy_config": {"k0": 2},
        "expert_policy_trace": None,
        "expert_policy_on_disagreement": None,
        "expert_policy_ignore_client_exact": False,
    }
