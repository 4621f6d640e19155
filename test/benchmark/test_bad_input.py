"""What a benchmark's command refuses is one line, before anything is measured or written. What its parser alone refuses
is in common/test_command.py.
"""

from importlib import import_module

import pytest

from benchmark.common.command import one_line_errors

PAGED = ("--per-domain", "4", "--prompt", "16", "--steps", "8", "--batches", "2")
CASES: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "serving.__main__": [
        (("vanilla", "vanilla"), "policies must differ from each other (got vanilla vanilla)"),
        (("off", "--drafted", "oea", "oea"), "--drafted must differ from each other (got oea oea)"),
        (("--topk", "0"), "argument --topk: must be a whole number above 0 (got '0')"),
        (("--output-tokens", "3", "--model", "."), "output tokens must be at least 4 (got 3)"),
    ],
    "cost.__main__": [
        (("nope",), "policy = 'nope':"),
        (("xshare:min_rows=4",), "'xshare:min_rows=4': min_rows needs a server"),
        (("--shapes", "16"), "argument --shapes: must be ROWSxEXPERTS, such as 16x64 (got '16')"),
    ],
    "cost.ranks": [(("--active", "3"), "--active must be between --top-k 4 and --experts 128 (got 3)")],
    "affinity.__main__": [
        (("mixed", "--replicas", "0"), "argument --replicas: must be a whole number above 0 (got '0')")
    ],
    "affinity.live": [
        (("--life", "3"), "--life must be at least 4, because half of --life must have a decoded token (got 3)"),
        (("--requests", "191"), "--requests must be at least 192, 3 times --replicas * --per-replica (got 191)"),
        (("--replicas", "2", "--per-replica", "4", "--requests", "23"), "--requests must be at least 24, "),
        *((("--bound", bound), f"--bound: {bound}:") for bound in ("0.5", "nan", "inf", "wide")),
        (("--policies", "vanilla", "off"), "--policies: must be a policy other than off and observe (got 'off')"),
        (("--policies", "observe"), "(got 'observe')"),
    ],
    "balance.__main__": [(("vanilla/xshare:k0=x",), "k0 = 'x'")],
    "balance.live": [((name,), f"policy must select (got '{name}')") for name in ("vanilla", "observe", "off")],
    "expert_sharding.__main__": [
        (("--alpha", "-1"), "--alpha: -1:"),
        (("--ranks", "3"), "batch must be a multiple of 3 on 3 ranks (got 100)"),
        (("--width", "33"), "width must be a multiple of 8 on 2 ranks (got 33)"),
    ],
    "quality.__main__": [
        (("--batch", "5"), "--per-domain must be a multiple of --batch 5 (got 32)"),
        (("--per-domain", "1", "--batch", "1"), "--per-domain must be at least 2"),
        (("xshare:min_rows=4",), "'xshare:min_rows=4': min_rows needs a server"),
        (("--texts", "/"), "texts must be a folder of held-out *.txt files (got /)"),
    ],
    "quality.front.__main__": [
        (("pruned:k0=3",), "policy must be a setting of xshare, oea, moe-spec (got pruned:k0=3)"),
        (("--batch", "3"), "--batch must divide 128 (got 3)"),
        (("--tokens-per-request", "3"), "--tokens-per-request must divide 64 (got 3)"),
        (("xshare:k0=9",), "k0 = 9:"),
        (("xshare:own_share=0.5",), "own_share must be given once"),
    ],
    "quality.drafts.__main__": [
        (("--chance", "0"), "--chance must be above 0 and at most 1 (got 0.0)"),
        (("--batch", "3"), "--batch must divide the 64 sequences (got 3)"),
        (("--tokens-per-request", "999"), "--tokens-per-request must be at most --steps"),
    ],
    "tuning.__main__": [
        (("--offline", "--samples", "8"), "--samples must be at least the largest batch, 16 (got 8)"),
        (("--batch", "4", "1"), "--batch: 1:"),
        (("--samples", "1", "--batch", "2"), "--samples: 1:"),
        (("vanilla",), "policy must select (got 'vanilla')"),
    ],
    "paged.__main__": [
        ((*PAGED, "--slots", "4"), "--slots must be the model's top-k, 8, to 64 (got 4)"),
        ((*PAGED, "--slots", "65"), "(got 65)"),
        ((*PAGED, "--batch", "17"), "--batch must be at most the text's 16 sequences (got 17)"),
        ((*PAGED, "vanilla"), "policy must select (got 'vanilla')"),
        ((*PAGED, "xshare:add=x"), "add = 'x'"),
        ((*PAGED, 'xshare:{"layers": {"9": {"add": 1}}}'), "layers 9:"),
    ],
}


@pytest.mark.parametrize(
    ("module", "args", "says"), [(module, *case) for module, cases in CASES.items() for case in cases]
)
def test_bad_input_is_one_line(module, args, says, tmp_path):
    with pytest.raises(SystemExit) as stop, one_line_errors("benchmark"):
        import_module(f"benchmark.{module}").main([*args, "--out", str(tmp_path / "out")])
    assert says in str(stop.value.code)
    assert "\n" not in str(stop.value.code)
    assert not (tmp_path / "out").exists()
