"""A patched release after `pip uninstall sglang-xshare`: it serves as published, and refuses a policy in one line."""

from pathlib import Path

import pytest

from benchmark.common.paths import ROOT
from served.answers import ask
from served.release import CPU, make_env, oldest_takes_long
from served.test_start import LAUNCH, check_refusal, start

MISSING = 'raise ModuleNotFoundError("No module named \'sglang_xshare\'", name="sglang_xshare")\n'


@pytest.fixture
def uninstalled(tmp_path: Path) -> Path:
    """A folder that comes first on the path, and makes our package as good as uninstalled."""
    folder = tmp_path / "uninstalled"
    (folder / "sglang_xshare").mkdir(parents=True)
    (folder / "sglang_xshare/__init__.py").write_text(MISSING)
    return folder


@pytest.mark.long
@oldest_takes_long
def test_it_answers_as_the_unpatched_release(release, patched_release, served, tiny_model, tmp_path, uninstalled):
    tree = patched_release(release)
    path = f"{uninstalled}:{tree}:{ROOT / 'test'}:{tmp_path / 'plugin'}"
    answers = ask(tiny_model, tree, (), tmp_path, sizes=(16,), env={"PYTHONPATH": path})
    assert answers.calls("DECODE"), "the probe counted"
    assert answers.tokens[0] == served("unpatched", release).tokens[0]
    assert "xpert policy" not in answers.log


@oldest_takes_long
def test_a_policy_is_refused_in_one_line(release, patched_release, tiny_model, uninstalled):
    env = make_env(patched_release(release))
    env["PYTHONPATH"] = f"{uninstalled}:{env['PYTHONPATH']}"
    line = "--expert-policy xshare: needs the package sglang-xshare, which is not installed, or not in the version of"
    line += " these patches; install it and run `sglang-xshare patch apply`, or leave the flag out"
    process = start([*LAUNCH, "--model-path", str(tiny_model), *CPU, "--expert-policy", "xshare"], env)
    _, said = check_refusal(process, line)
    assert [told for told in said.splitlines() if "xshare" in told] == [line]
