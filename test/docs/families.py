"""The model classes that a policy was executed on, and how to start each: a part of docs/limits.md, from the tests.

PYTHONPATH=python:test python -m docs.families           write that part
PYTHONPATH=python:test python -m docs.families --check   check whether it is up to date
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmark.common.paths import RESULTS, ROOT
from benchmark.gpu.models import read_config
from fake_gpu.models import COMMON, CONFIGS, HERE_ALONE
from scripts.compatibility import replace_table
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
    "family",
    "SGLang's class",
    "start",
    "answers, on a CPU",
    "speed, on a GPU",
    "graphs, on a stand-in",
    "without",
)
BEGIN = "<!-- made by python -m docs.families -->\n"
TEXT = """\
SGLang {latest} registers {registered} classes that can hold experts. Tests run {on_cpu} of them on a CPU. {stood_in}
more run only on a [stand-in for a GPU](gpu.md#without-a-gpu-make-test-cuda), which captures and replays CUDA graphs but
computes nothing. {tried} more are [untested](#untested), and {refused} are [refused by name](#refused).

### Executed

The machines of this project cannot hold these models, so none of these start commands has run here. `--tp` is an
example; [`check`](check.md) reports whether the weights fit with another number.

* *Answers, on a CPU*: a tiny model with random weights in float32 answered requests. *Transformers*: its answers equal
  the answers of transformers, token for token. *Pristine*: its answers equal the answers of unpatched SGLang, as long
  as the policy removes no expert. *Interpreted*: Triton's interpreter ran the SGLang kernels that have no CPU version.
* *Speed, on a GPU*: a model of the published widths with random weights was timed ([results](gpu.md#h200-results)).
  Its answers were not compared.
* *Graphs, on a stand-in*: CUDA graphs were captured, padded, replayed and switched; nothing was computed.
* *Without*: parts of the published model that the tiny model does not have, or that other code computes instead.

{executed_rows}
### Untested

No test has served these classes. A server with such a class loads its weights. It then starts only if each MoE layer
has one router, and if this project can compute the choice of this router. Otherwise an error names the layer.

{tried_names}

### Refused

A server with one of these classes is refused before it loads its weights. The table shows the reason:

{refused_rows}"""


def make_page() -> str:
    """Return the whole page with that part written anew."""
    targets = set(json.loads(JUDGED.read_text())["targets"])
    tried = sorted(targets - set(EXECUTED) - set(UNSERVED))
    reasons = dict.fromkeys(UNSERVED.values())
    classes = (
        (", ".join(f"`{name}`" for name, why in UNSERVED.items() if why == reason), reason) for reason in reasons
    )
    part = TEXT.format(
        latest=LATEST,
        registered=len(targets),
        on_cpu=len(EXECUTED) - len(HERE_ALONE),
        stood_in=len(HERE_ALONE),
        tried=len(tried),
        refused=len(UNSERVED),
        executed_rows=tabulate(HEADINGS, list_executed()),
        tried_names=", ".join(f"`{name}`" for name in tried),
        refused_rows=tabulate(("class", "why"), classes),
    )
    return replace_table(PAGE.read_text(), part, BEGIN)


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


def main() -> None:
    """Write the page, or compare it; exit with 1 if it differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, page = parser.parse_args().check, make_page()
    if not check:
        PAGE.write_text(page)
    elif PAGE.read_text() != page:
        sys.exit("families: docs/limits.md is not up to date: PYTHONPATH=python:test python -m docs.families")


if __name__ == "__main__":
    main()
