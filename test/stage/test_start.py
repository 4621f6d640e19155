"""Every way to start a server refuses a wrong policy alike: one line, exit code 1, nothing loaded."""

import subprocess
import sys
from pathlib import Path

from sglang_xshare.policies import list_policies
from stage.release import CPU, make_env, older_releases_take_long

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


@older_releases_take_long
def test_every_way_to_start_says_one_line_and_exits_with_1(release, patched_release, tiny_model, tmp_path):
    names = ", ".join(policy.name for policy in list_policies())
    line = f"--expert-policy nope: policy = 'nope': allowed is one of {names}"
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
        assert said.splitlines().count(line) == 1, f"{name}: {said}"
        assert said.count("expert-policy") == 1, f"{name} says more than one line about it: {said}"
        assert "Traceback" not in said, name
        assert "Load weight" not in said + printed, name
        assert (line in printed) == (name == "Engine"), f"{name} raises a ValueError"
