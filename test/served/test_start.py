"""Every way to start a server refuses a wrong policy alike: one line, exit code 1, nothing loaded."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from served.release import CPU, every_release, make_env, older_releases_take_long

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


@older_releases_take_long
def test_every_way_to_start_says_one_line_and_exits_with_1(release, patched_release, tiny_model, tmp_path):
    line = "--expert-policy nope: policy = 'nope': "
    flags = ["--model-path", str(tiny_model), *CPU, "--expert-policy", "nope"]
    (tmp_path / "engine.py").write_text(ENGINE)
    commands = {
        "python -m sglang.launch_server": [sys.executable, "-m", "sglang.launch_server", *flags],
        "sglang serve": [str(Path(sys.executable).with_name("sglang")), "serve", *flags],
        "Engine": [sys.executable, str(tmp_path / "engine.py"), str(tiny_model)],
    }
    env = make_env(patched_release(release))
    running = {
        name: subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for name, command in commands.items()
    }
    for name, process in running.items():
        printed, said = process.communicate(timeout=200)
        assert process.returncode == 1, f"{name} exits with {process.returncode}: {said}"
        assert said.count(f"\n{line}") + said.startswith(line) == 1, f"{name}: {said}"
        assert said.count("expert-policy") == 1, f"{name} says more than one line about it: {said}"
        assert "Traceback" not in said, name
        assert "Load weight" not in said + printed, name
        assert (line in printed) == (name == "Engine"), f"{name} raises a ValueError"


@older_releases_take_long
def test_a_model_that_does_not_fit_is_refused_before_its_weights_load(release, patched_release, tiny_model, tmp_path):
    """The launcher itself, on configurations without weights."""
    written = json.loads((tiny_model / "config.json").read_text())
    written |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    dense = {key: value for key, value in written.items() if "expert" not in key}
    (tmp_path / "config.json").write_text(json.dumps(dense))
    policy = ["--expert-policy", "xshare"]
    lines = {
        f"--model-path {tmp_path}: ": ["--model-path", str(tmp_path), *policy],
        "--expert-policy xshare: k0 = 9: ": [
            *("--model-path", str(tiny_model), *policy, "--expert-policy-config", '{"k0": 9}')
        ],
    }
    env = make_env(patched_release(release))
    command = [sys.executable, "-m", "sglang.launch_server", *CPU]
    running = {
        line: subprocess.Popen([*command, *flags], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line, flags in lines.items()
    }
    for line, process in running.items():
        check_refusal(process, line)


@pytest.mark.long
@every_release
def test_what_only_a_loaded_model_shows_ends_the_server_alike(release, patched_release, tiny_model, tmp_path):
    """A plugin plays the router that the stage does not know."""
    (tmp_path / "late.py").write_text(LATE)
    plugin = tmp_path / "late-1.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1\n")
    (plugin / "entry_points.txt").write_text("[sglang.srt.plugins]\nlate = late:install\n")
    env = make_env(patched_release(release))
    env["PYTHONPATH"] += f":{tmp_path}"
    flags = ["--model-path", str(tiny_model), *CPU, "--disable-cuda-graph", "--expert-policy", "xshare"]
    command = [sys.executable, "-m", "sglang.launch_server", *flags]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    check_refusal(process, "model.layers.0.mlp.topk router: ", loads=True)


def check_refusal(process: subprocess.Popen[str], line: str, loads: bool = False) -> None:
    """The server has printed one line that begins so and no traceback, and ends with status 1."""
    printed, said = process.communicate(timeout=200)
    assert process.returncode == 1, said
    assert said.count(f"\n{line}") + said.startswith(line) == 1, said
    assert "Traceback" not in said + printed, said
    assert ("Load weight" in said + printed) == loads, said
