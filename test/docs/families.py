"""The model classes that a policy was executed on, and how to start each: parts of docs/limits.md, from the tests.

PYTHONPATH=python:test python -m docs.families           write these parts
PYTHONPATH=python:test python -m docs.families --check   check whether they are up to date
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmark.common.paths import RESULTS, ROOT
from benchmark.gpu.models import read_config
from fake_gpu.models import COMMON, CONFIGS, HERE_ALONE
from scripts.compatibility import replace_table, write_page
from scripts.reference import tabulate
from served.family import FAMILIES, INTERPRETED, ON_OLDER
from served.gemma import GEMMA
from served.hub import ON_HUB
from served.hybrids import HYBRIDS
from served.recent import RECENT
from served.release import LATEST, OLDEST
from sglang_xshare.compatibility.architectures import EXECUTED, UNSERVED
from sglang_xshare.patching.queue import find_root, list_releases

PAGE = ROOT / "docs" / "limits.md"
JUDGED = ROOT / "test" / "compatibility" / "architectures.json"
HEADINGS = (
    *("family", "SGLang's class", "start", "answers, on a CPU"),
    *("speed, on a GPU", "graphs, on a stand-in", "without"),
)
BEGIN = "<!-- made by python -m docs.families: {} -->\n"


def make_page() -> str:
    """Return the whole page with its four parts written anew."""
    targets = set(json.loads(JUDGED.read_text())["targets"])
    tried = sorted(targets - set(EXECUTED) - set(UNSERVED))
    reasons = dict.fromkeys(UNSERVED.values())
    classes = (
        (", ".join(f"`{name}`" for name, why in UNSERVED.items() if why == reason), reason) for reason in reasons
    )
    counts = (
        ("registered", len(targets)),
        ("[executed](#executed) by tests on a CPU", len(EXECUTED) - len(HERE_ALONE)),
        ("executed only on a [stand-in for a GPU](gpu.md#without-a-gpu-make-test-cuda)", len(HERE_ALONE)),
        ("[untested](#untested)", len(tried)),
        ("[refused by name](#refused)", len(UNSERVED)),
    )
    parts = {
        "counts": tabulate(
            (f"classes of SGLang {LATEST} that can hold experts", "number"),
            ((name, str(count)) for name, count in counts),
        ),
        "executed": tabulate(HEADINGS, list_executed()),
        "untested": ", ".join(f"`{name}`" for name in tried) + "\n",
        "refused": tabulate(("class", "why"), classes),
    }
    page = PAGE.read_text()
    for name, part in parts.items():
        page = replace_table(page, part, BEGIN.format(name))
    return page


def list_executed() -> Iterator[tuple[str, ...]]:
    """A row a family, by name."""
    measured, captured = read_measured(), list_captured()
    for architecture, name in sorted(EXECUTED.items(), key=lambda item: item[1].lower()):
        starts = "<br>".join(f"`{start}`" for start in ON_HUB[name].list_starts())
        starts += f"<br>Warning: starts the untested `{ON_HUB[name].untested}`" if ON_HUB[name].untested else ""
        more = "; ".join(measured.get(architecture, ())), captured.get(architecture, "")
        yield name, f"`{architecture}`", starts, describe_answers(name), *more, ON_HUB[name].without


def describe_answers(name: str) -> str:
    """With what the answers of its tiny model were compared, on which releases; nothing where no CPU runs it."""
    if name in HERE_ALONE.values():
        return ""
    every = list_releases(find_root())
    releases = {"Qwen3-MoE": f"{every[0]} to {every[-1]}"}.get(name, LATEST)
    if name in ON_OLDER:
        releases = ", ".join((OLDEST, LATEST))
    compared = "transformers" if name in FAMILIES | HYBRIDS else "pristine"
    env = RECENT[name].env if name in RECENT else {**FAMILIES, **HYBRIDS, "Gemma 4": GEMMA}[name].env
    interpreted = "; interpreted" if env.items() >= INTERPRETED.items() else ""
    return f"{compared}, {releases}{interpreted}"


def read_measured() -> Mapping[str, Iterable[str]]:
    """By class, what records of servers on GPUs say: GPU, release, quantization, MoE runner."""
    found: dict[str, dict[str, None]] = {}
    for path in sorted(RESULTS.glob("*/server.json")):
        record = json.loads(path.read_text())
        for point in record["points"].values():
            session = record["sessions"][point["session"]]
            for series in point.get("series", ()):
                command = series["command"]
                config = read_config(Path(command[command.index("--model-path") + 1]).name)
                gpu = session["hardware"]["gpu"].split(",")[0].removeprefix("NVIDIA ").split()[0]
                runner = command[command.index("--moe-runner-backend") + 1]
                text = f"{gpu}, {session['versions']['sglang']}: {name_format(config)} by {runner}"
                found.setdefault(config["architectures"][0], {})[text] = None
    return found


def list_captured() -> Mapping[str, str]:
    """By class, in which format `test/fake_gpu` serves it."""
    return {config["architectures"][0]: name_format(config) for config in CONFIGS.values()}


def name_format(config: Mapping[str, Any]) -> str:
    """Of a model's experts, as its configuration says."""
    given = config.get("quantization_config", {})
    kind = config.get("expert_dtype") or given.get("format") or given.get("quant_method", COMMON["dtype"])
    return str(kind).replace("bfloat16", "bf16").replace("fp4", "mxfp4").replace("mxmx", "mx").partition("-")[0]


if __name__ == "__main__":
    write_page(PAGE, make_page, "PYTHONPATH=python:test python -m docs.families", __doc__)
