"""Input that would measure something else than it names is refused in one line, before anything is written."""

from importlib import import_module

import pytest

from benchmark.common.command import one_line_errors

PAGED = ("--per-domain", "4", "--prompt", "16", "--steps", "8", "--batches", "2")
CASES: dict[str, list[tuple[tuple[str, ...], str]]] = {
    "serving.__main__": [
        (("vanilla", "vanilla"), "policies must differ from each other (got vanilla vanilla)"),
        (("off", "--drafted", "oea", "oea"), "--drafted must differ from each other (got oea oea)"),
    ],
    "serving.exact": [(("--exact", "0", "16"), "--exact must be ")],
    "cost.__main__": [(("xshare:min_rows=4",), "'xshare:min_rows=4': min_rows needs a server")],
    "cost.ranks": [(("--active", "3"), "--active must be between --top-k 4 and --experts 128 (got 3)")],
    "depth.__main__": [(("--fixed", "1", "3"), "--fixed must contain 0, the baseline of all depths (got 1 3)")],
    "affinity.live": [
        (("--requests", "191"), "--requests must be at least 192, 3 times --replicas * --per-replica (got 191)"),
        (("--policies", "vanilla", "off"), "--policies: must be a policy other than off and observe (got 'off')"),
    ],
    "balance.live": [(("vanilla",), "policy must select (got 'vanilla')")],
    "expert_sharding.__main__": [(("--ranks", "3"), "batch must be a multiple of 3 on 3 ranks (got 100)")],
    "quality.__main__": [
        (("--batch", "5"), "--per-domain must be a multiple of --batch 5 (got 32)"),
        (("--per-domain", "1", "--batch", "1"), "--per-domain must be at least 2"),
    ],
    "quality.front.__main__": [
        (("--batch", "3"), "--batch must divide 128 (got 3)"),
        (("--tokens-per-request", "3"), "--tokens-per-request must divide 64 (got 3)"),
        (("xshare:own_share=0.5",), "own_share must be given once"),
    ],
    "quality.drafts.__main__": [(("--batch", "3"), "--batch must divide the 64 sequences (got 3)")],
    "tuning.__main__": [
        (("--offline", "--samples", "8"), "--samples must be at least the largest batch, 16 (got 8)"),
        (("vanilla",), "policy must select (got 'vanilla')"),
    ],
    "paged.__main__": [
        ((*PAGED, "--slots", "4"), "--slots must be the model's top-k, 8, to 64 (got 4)"),
        ((*PAGED, "--batch", "17"), "--batch must be at most the text's 16 sequences (got 17)"),
    ],
    "records.__main__": [(("--small",), "--small must be used with another --out")],
}


@pytest.mark.parametrize(
    ("module", "args", "says"), [(module, *case) for module, cases in CASES.items() for case in cases]
)
def test_bad_input_is_one_line(module, args, says, tmp_path):
    out = [] if module.startswith("records") else ["--out", str(tmp_path / "out")]
    with pytest.raises(SystemExit) as stop, one_line_errors("benchmark"):
        import_module(f"benchmark.{module}").main([*args, *out])
    assert says in str(stop.value.code)
    assert "\n" not in str(stop.value.code)
    assert not (tmp_path / "out").exists()
