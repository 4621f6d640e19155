"""Every way to start a server refuses a wrong policy alike: one line, exit code 1, nothing loaded."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from served.answers import install_plugin
from served.release import CPU, both_releases, make_env, oldest_takes_long

LAUNCH = (sys.executable, "-m", "sglang.launch_server")
ENGINE = """
import sys
import sglang
if __name__ == "__main__":
    try:
        sglang.Engine(model_path=sys.argv[1], device="cpu", attention_backend="torch_native", expert_policy="nope")
    except ValueError as error:
        print(error)
    sglang.Engine(model_path=sys.argv[1], device="cpu", attention_backend="torch_native", expert_policy="nope")
"""

LATE = """
def install():
    from sglang_xshare.stage import layer

    def refuse(topk_config):
        raise ValueError("a router of its own")

    layer.read_router = refuse
"""


@oldest_takes_long
def test_every_way_to_start_says_one_line_and_exits_with_1(release, patched_release, tiny_model, tmp_path):
    line = "--expert-policy nope: policy = 'nope': "
    flags = ["--model-path", str(tiny_model), *CPU, "--expert-policy", "nope"]
    (tmp_path / "engine.py").write_text(ENGINE)
    commands = {
        "python -m sglang.launch_server": [*LAUNCH, *flags],
        "sglang serve": [str(Path(sys.executable).with_name("sglang")), "serve", *flags],
        "Engine": [sys.executable, str(tmp_path / "engine.py"), str(tiny_model)],
    }
    env = make_env(patched_release(release))
    running = {name: start(command, env) for name, command in commands.items()}
    for name, process in running.items():
        printed, said = check_refusal(process, line)
        assert said.count("expert-policy") == 1, f"{name} says more than one line about it: {said}"
        assert (line in printed) == (name == "Engine"), f"{name} raises a ValueError"


@oldest_takes_long
def test_a_model_that_does_not_fit_is_refused_before_its_weights_load(release, patched_release, tiny_model, tmp_path):
    """The launcher itself, on configurations without weights."""
    written = json.loads((tiny_model / "config.json").read_text())
    written |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    dense = {key: value for key, value in written.items() if "expert" not in key}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    policy = ["--expert-policy", "xshare"]
    keys = ["--expert-policy-config", '{"k0": 9}']
    lines = {
        f"--model-path {tmp_path}: ": ["--model-path", str(tmp_path), *policy],
        "--expert-policy xshare: k0 = 9: ": ["--model-path", str(tiny_model), *policy, *keys],
    }
    env = make_env(patched_release(release))
    running = {line: start([*LAUNCH, *CPU, *flags], env) for line, flags in lines.items()}
    for line, process in running.items():
        check_refusal(process, line)


@pytest.mark.long
@both_releases
def test_what_only_a_loaded_model_shows_ends_the_server_alike(release, patched_release, tiny_model, tmp_path):
    """A plugin plays the router that the stage does not know."""
    (tmp_path / "late.py").write_text(LATE)
    install_plugin(tmp_path, "late:install")
    env = make_env(patched_release(release))
    env["PYTHONPATH"] += f":{tmp_path}:{tmp_path / 'plugin'}"
    flags = ["--model-path", str(tiny_model), *CPU, "--disable-cuda-graph", "--expert-policy", "xshare"]
    check_refusal(start([*LAUNCH, *flags], env), "model.layers.0.mlp.topk router: ", loads=True)


def start(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def check_refusal(process: subprocess.Popen[str], line: str, loads: bool = False) -> tuple[str, str]:
    """The server has printed one line that begins so and no traceback, and ends with status 1. Returns all it said."""
    printed, said = process.communicate(timeout=200)
    assert process.returncode == 1, said
    assert said.count(f"\n{line}") + said.startswith(line) == 1, said
    assert "Traceback" not in said + printed, said
    assert ("Load weight" in said + printed) == loads, said
    return printed, said
