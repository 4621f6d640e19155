"""What `check` says that nobody has executed, and how far its estimate was off: by the records of GPUs."""

import re

import pytest

from benchmark.common.paths import RESULTS, ROOT
from benchmark.common.record import read_record
from check.asking import QWEN, compare, compare_step, say
from sglang_xshare.check.executed import GPUS_SERVED, MISSES, RELEASES_ON_GPU, describe_miss, list_never_executed
from sglang_xshare.check.server import read_flags
from sglang_xshare.gpus import GPUS

SERVERS = sorted(RESULTS.glob("*-nvidia-*/server.json"))


def list_steps(write):
    """Yield (class, estimated and measured ms off and on) of every server that a record has."""
    for path in SERVERS:
        (gpu,) = (gpu for gpu in GPUS_SERVED if gpu in path.parent.name)
        for key, point in read_record(path)["points"].items():
            if (found := re.search(r"/concurrency=(\d+)$", key)) is None:
                continue
            model, _, estimated, measured = compare_step(point, int(found[1]), GPUS[gpu].bandwidth * 1e9, write)
            yield model.architecture, estimated, measured


def test_misses_are_those_of_the_records(write):
    found: dict[str, list] = {}
    for architecture, estimated, measured in list_steps(write):
        found.setdefault(architecture, []).append((estimated, measured))
    assert found.keys() == MISSES.keys()
    for architecture, miss in MISSES.items():
        pairs = found[architecture]
        assert miss.steps == 2 * len(pairs)
        times = [mine / theirs for pair in pairs for mine, theirs in zip(*pair, strict=True)]
        gains = [mine[0] / mine[1] - theirs[0] / theirs[1] for mine, theirs in pairs]
        assert miss.time == (round(min(times), 2), round(max(times), 2))
        assert miss.speedup == (round(min(gains), 2), round(max(gains), 2))
        told = " ".join((ROOT / "docs" / "check.md").read_text().split())
        assert "{} to {} times".format(*miss.time) in told
        assert f"({miss.steps} steps)" in told
        assert f"{-miss.speedup[0]} below to {miss.speedup[1]} above" in told


def test_gpus_and_releases_are_those_of_the_records():
    sessions = [session for path in SERVERS for session in read_record(path)["sessions"]]
    assert {session["versions"]["sglang"] for session in sessions} == set(RELEASES_ON_GPU)
    assert {gpu for path in SERVERS for gpu in GPUS_SERVED if gpu in path.parent.name} == set(GPUS_SERVED)


NEVER = {
    "--tp 8": ["several GPUs"],
    "--pp-size 2": ["several GPUs"],
    "--tp 8 --moe-a2a-backend deepep": ["several GPUs", "--moe-a2a-backend deepep"],
    "": [],
}


def list_never(flags="", architecture="Qwen3MoeForCausalLM", **report):
    found = {"gpu": "h100", "sglang": RELEASES_ON_GPU[-1], "moe_runner": "triton"} | report
    return list_never_executed(read_flags(flags.split()), architecture, found)


def test_parts_that_no_record_has_are_named():
    assert {flags: list_never(flags) for flags in NEVER} == NEVER


def test_runner_release_gpu_and_family_are_named():
    assert list_never(moe_runner="flashinfer_trtllm") == ["MoE runner flashinfer_trtllm"]
    for release in ("0.5.21", "0.5.24"):
        assert list_never(sglang=release) == [f"SGLang {release} on a GPU (executed: 0.5.17, 0.5.23)"]
    assert [list_never(sglang=release) for release in RELEASES_ON_GPU] == [[], []]
    assert list_never(gpu="b200") == ["a GPU of this kind (b200)"]
    assert list_never(architecture="MixtralForCausalLM") == ["this model family on a GPU"]
    assert list_never("--tp 8", gpu=None, device="cpu") == [], "a CPU's servers are tests"
    assert list_never("--tp 8", gpu=None, device="cuda") == ["several GPUs"]
    assert list_never(sglang=None) == []


@pytest.mark.usefixtures("served")
def test_a_report_has_them_and_its_miss(write, tell, capsys):
    ranks = ("--tp", 8, "--attn-dp-size", 8)
    asked = ("--model", write(QWEN), "--gpu", "b200", *ranks, "--batch", 16, *compare("oea:k0=3"))
    report = tell(*asked)
    assert report["never_executed"] == ["several GPUs", "a GPU of this kind (a GPU)"], "as the fixture names it"
    assert report["estimate"]["missed"] == describe_miss("Qwen3MoeForCausalLM")
    alone = "data-parallel attention: while one rank prefills, the step is vanilla on all ranks"
    assert {"by": "sglang-xshare", "says": alone} in report["warnings"]
    assert say(*asked) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "never executed several GPUs; a GPU of this kind" in out
    assert alone in out
    assert describe_miss("Qwen3MoeForCausalLM") in out


def test_a_family_without_measurements_says_so():
    assert describe_miss("MixtralForCausalLM").startswith("No step of this model family was measured on a GPU")
