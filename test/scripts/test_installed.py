"""What we tell users to run, in an environment of its own: SGLang patched, upgraded and left; and our wheels, served.

SGLang and this package come from pip and from the wheels; only their dependencies are lent by the environment that runs
the test, of which a new one would take minutes and gigabytes.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmark.common.paths import ROOT
from benchmark.common.server import Server
from sglang_xshare import __version__
from sglang_xshare.patching.queue import find_root, load_queue

pytestmark = pytest.mark.long

RECIPE = (ROOT / "docs/patching.md").read_text().partition("## Install, upgrade, leave")[2].partition("\n## ")[0]
NO_DEPS = {"PIP_NO_DEPS": "1"}  # for SGLang, whose 70 dependencies a CPU neither has nor needs
OWN = ("sglang", "sglang_xshare", "__editable__", "_sglang")


@pytest.fixture
def shell(tmp_path: Path) -> Callable[..., str]:
    """Call it with commands for what they print, run in this checkout with a new environment's pip and python."""
    venv, lent = tmp_path / "venv", tmp_path / "lent"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    lent.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(OWN) or entry.name.startswith("sglang_xshare_cpu_kernel"):
            (lent / entry.name).symlink_to(entry)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "lent.pth").write_text(f"{lent}\n{ROOT / 'sgl-kernel'}\n")
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env |= {"PATH": f"{venv / 'bin'}:{env['PATH']}", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}

    def run(commands: str, code: int = 0, **more: str) -> str:
        command = ["bash", "-euc", commands]
        done = subprocess.run(command, env=env | more, cwd=ROOT, capture_output=True, text=True)
        said = done.stdout + done.stderr
        assert done.returncode == code, f"{commands}: {done.returncode}: {said}"
        return said

    assert "No module named 'sglang'" in run("python -c 'import sglang'", code=1)
    return run


def test_the_recipe_of_the_docs(shell: Callable[..., str], tmp_path: Path) -> None:
    """As the page has it, `pip install sglang==0.5.23` and `pip uninstall --yes sglang-xshare` among it."""
    install, upgrade_sglang, leave = re.findall(r"^```\n(.*?)^```$", RECIPE, re.MULTILINE | re.DOTALL)
    shell("pip install sglang==0.5.22", **NO_DEPS)
    said = shell(install)
    queue = load_queue(find_root(), "0.5.22")
    patches, files = f"{len(queue.patches)} patches", f"{len(queue.hashes)} files"
    assert f"{patches} applied to {files}" in said
    assert "patch status: SGLang 0.5.22 in " in said

    (state,) = tmp_path.glob("venv/lib/python*/site-packages/sglang/.xshare/state.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"queue": "0" * 64}))
    assert "patched by another version of the queue" in shell("sglang-xshare patch status", code=1)
    assert f"{patches} applied to {files}" in shell(install)  # upgrades, too

    said = shell(upgrade_sglang, **NO_DEPS)
    assert "SGLang 0.5.22" in said
    assert f"{files} reverted" in said
    assert "patch apply: SGLang 0.5.23 in " in said
    assert shell("sglang-xshare --version") == f"sglang-xshare {__version__}\n"

    package = state.parents[1]
    assert (package / "srt/expert_policy.py").exists()
    shell(leave)
    shell("python -c 'import sglang_xshare'", code=1)
    assert not state.parent.exists()
    assert not (package / "srt/expert_policy.py").exists()
    shell("pip uninstall --yes sglang")
    assert [file for file in package.rglob("*.py*") if file.is_file()] == []


MAKE = """
from pathlib import Path
from scripts.sglang_wheel import download_wheel, find_root, make_wheel
import sys
make_wheel(download_wheel("0.5.23", Path(sys.argv[1])), find_root(), Path(sys.argv[2]))
"""


def test_a_patched_sglang_is_installed_from_wheels_and_served(
    shell: Callable[..., str], tmp_path: Path, tiny_model: Path
) -> None:
    """`make sglang-wheel SGLANG=0.5.23`, then `pip install dist/*.whl`."""
    upstream, dist = tmp_path / "upstream", tmp_path / "dist"
    upstream.mkdir()
    subprocess.run([sys.executable, "-c", MAKE, upstream, dist], cwd=ROOT, check=True)
    shell(f"pip wheel --quiet --no-deps --wheel-dir {dist} ./python")
    shell(f"pip install --no-index {dist}/*.whl", **NO_DEPS)
    assert f"Version: 0.5.23+xshare.{__version__}\n" in shell("pip show sglang")
    said = shell("sglang-xshare patch status && python -c 'import sglang_xshare; print(sglang_xshare.__file__)'")
    assert f"SGLang 0.5.23 in {tmp_path}/venv" in said
    files = f"{len(load_queue(find_root(), '0.5.23').hashes)} files"
    assert f": patched, {files}" in said
    assert said.splitlines()[-1].startswith(f"{tmp_path}/venv/")

    policy = ["--expert-policy", "xshare", "--expert-policy-config", '{"k0": 1, "add": 8}']
    server = Server(tiny_model, ["--enable-metrics", "--decode-log-interval", "4", *policy], env={"PYTHONPATH": ""})
    server.command[0] = str(tmp_path / "venv/bin/python")
    with server:
        answers = server.generate(["def f(", "The ", "1 + 1 =", "int main("], max_new_tokens=16, ignore_eos=True)
        metrics = server.get("/metrics")
    assert all(len(answer["output_ids"]) == 16 for answer in answers)
    assert re.search(r'expert_policy_steps_total\{.*outcome="policy".*\} [1-9]', metrics)
    assert "active experts: " in server.log_text()
    assert f"{files} reverted" in shell("sglang-xshare patch revert")
