"""The documents are read as a reader sees them, and what is wrong with them is found."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmark.common.paths import RESULTS
from benchmark.common.record import read_record
from benchmark.common.speculative import DRAFTING
from benchmark.common.variant import parse_plan
from benchmark.records.experiments import EXPERIMENTS
from benchmark.serving.report import quality_key
from docs.check import check_elsewhere, check_folders, check_places, check_runs, list_folders
from docs.documents import ROOT, Command, read_commands
from docs.runs import Ask, Elsewhere, Run, Same
from sglang_xshare import build_plan
from sglang_xshare.policies import get_policy

PAGE = """\
---
license: none
---
# Title

Run `make test && make demo`, or `X=1 python -m thing --flag`, not `make` and not `scripts/lint.sh`.

```
export A=1 B=2
. .venv/bin/activate
serve --model M \\
    --flag 'a # b'   # why
curl -s localhost | grep x
```

```text
make nothing
```

    pip install it

| key | example |
| --- | --- |
| `policy` | `sglang-xshare policies` |

See [there](there.md#part), [the web](https://example.org), [below](#title); code: `test/docs`, `test/nowhere.py`.
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    file = tmp_path / "page.md"
    file.write_text(PAGE)
    return file


def test_commands_are_read_out_of_blocks_and_inline_code(page):
    context = ("export A=1 B=2",)
    assert read_commands(page, page.parent) == [
        Command("make test", (), "page.md"),
        Command("make demo", (), "page.md"),
        Command("X=1 python -m thing --flag", (), "page.md"),
        Command("serve --model M --flag 'a # b'", context, "page.md"),
        Command("curl -s localhost | grep x", context, "page.md"),
        Command("pip install it", context, "page.md"),
        Command("sglang-xshare policies", context, "page.md"),
    ]


def test_a_command_without_a_run_and_a_run_without_a_command_are_found():
    commands = [Command(text, (), "a.md") for text in ("make x", "curl y", "make z")]
    runs = {"make x": Run(), "curl y": Ask("serve"), "gone": Run(), "make z": Same("make y")}
    assert [problem.partition(": ")[2] for problem in check_runs(commands, {"make x": Run()})] == [
        "`curl y`: no test runs it; test/docs/runs.py says how",
        "`make z`: no test runs it; test/docs/runs.py says how",
    ]
    assert [problem.partition(": ")[2] for problem in check_runs(commands, runs)] == [
        "`gone`: no document shows it",
        "`curl y`: `serve` serves nothing",
        "`make z`: `make y` is not run",
    ]
    assert check_runs(commands, {"make x": Run(), "curl y": Run(), "make z": Same("make x")}) == []


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("test/gone.py", "test/gone.py is no file below test/"),
        ("scripts/make_venv.sh", "scripts/make_venv.sh is no file below test/"),
        ("test/../Makefile", "test/../Makefile is no file below test/"),
        ("test/scripts/test_make_venv.py", "test/scripts/test_make_venv.py does not name it"),
    ],
)
def test_a_command_that_runs_elsewhere_is_named_by_a_test(where, problem):
    text = " ".join(["make", "nothing"])  # else this file would name it
    assert check_elsewhere(text, Elsewhere(where, "")) == [problem]
    assert check_elsewhere("make venv", Elsewhere("test/scripts/test_make_venv.py", "")) == []


def test_links_and_paths_that_lead_nowhere_are_found(page):
    assert check_places([page], page.parent) == [
        "page.md: link to there.md: not there",
        "page.md: `scripts/lint.sh`: not there",
        "page.md: `test/docs`: not there",
        "page.md: `test/nowhere.py`: not there",
    ]


def test_a_folder_without_a_line_is_found():
    page = ROOT / "docs" / "architecture.md"
    assert check_folders(page, ["nowhere"]) == ["docs/architecture.md: no line for `nowhere`"]
    assert {"python/sglang_xshare/compatibility", "docs", "test"} <= set(list_folders())


def test_every_example_of_a_policy_is_measured_or_warned_of():
    """Each setting of the guide's table has its row in a record of quality, in decoding or in verification."""
    decoded, verified = (read_record(EXPERIMENTS[name].path(RESULTS))["points"] for name in ("quality", "serving"))
    measured = [parse_plan(policy) for policy in decoded]
    drafted = quality_key(DRAFTING)
    measured += [parse_plan(key.removeprefix(drafted), speculative=True) for key in verified if key.startswith(drafted)]
    guide = (ROOT / "docs" / "guide.md").read_text()
    rows = re.findall(r"^\| (`[a-z-]+`.*?) \| (.*?) \| (.*) \|$", guide, re.MULTILINE)
    examples = [
        (build_plan(name, **json.loads(keys)), meaning)
        for names, settings, meaning in rows
        for name, keys in zip(re.findall(r"`(.*?)`", names), re.findall(r"`({.*?})`", settings), strict=False)
        if get_policy(name).selects
    ]
    assert len(examples) >= 10
    assert [plan for plan, meaning in examples if plan not in measured and "Warning:" not in meaning] == []
