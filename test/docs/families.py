"""Which model classes a policy was executed on, and how to start each: docs/families.md, from what the tests have.

PYTHONPATH=python:test python -m docs.families           write the page
PYTHONPATH=python:test python -m docs.families --check   say whether it is up to date
"""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmark.common.paths import RESULTS, ROOT
from benchmark.gpu.models import read_config
from fake_gpu.gpu_models import HERE_ALONE
from fake_gpu.models import COMMON, CONFIGS
from scripts.reference import tabulate
from served.family import INTERPRETED
from served.family_table import FAMILIES, ON_OLDER
from served.gemma import GEMMA
from served.hub import ON_HUB
from served.hybrids import HYBRIDS
from served.recent import RECENT
from served.release import LATEST, OLDEST
from sglang_xshare.compatibility.architectures import EXECUTED, UNSERVED
from sglang_xshare.patching.queue import find_root, list_releases

PAGE = ROOT / "docs" / "families.md"
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
TEXT = """\
# Models, by family

What a policy was executed on, made by `test/docs/families.py` from what the tests serve; a test compares the two.
What else may be refused: [limits.md](limits.md).

SGLang {latest} registers {registered} classes that can hold experts: {executed} are executed in tests, [{tried} more
are tried](#tried), and [{refused} are refused by name](#refused). None is left out.

## Executed

* *Start*: none of these commands has run here, the machines of this project do not hold the models. `--tp` is an
  example: [`check`](check.md) says what holds the weights. Bare `xshare` follows the model: a count such as `add=24`
  cuts little of Granite's 40 experts and nothing of Mixtral's 8.
* *Answers, on a CPU*: a real server of a tiny model, random weights in float32, experts by SGLang's own loop for CPUs
  (no quantization, no other MoE runner). *Transformers*: token for token as transformers answers, with the policy off,
  at its full budget, and at a budget with the reference's selection (`test/served/test_families.py`). *Pristine*: token
  for token the release without our patches while nothing is cut, and each step's selection the reference's (the same
  file, and `test/served/test_frozen_mtp.py`). *Interpreted*: part of it by Triton's interpreter,
  since SGLang has no CPU path for it.
* *Speed, on a GPU*: published widths, random weights, no answer compared: [gpu.md](gpu.md#h200-results).
* *Graphs, on a stand-in*: captured, padded, replayed and switched; nothing is computed:
  [evidence.md](evidence.md#what-executed-each-cuda-path).
* *Without*: what the tiny model lacks of the published one.

{executed_rows}
## Tried

A server with one of these starts, and tells once it is loaded whether each of its MoE layers has one router that is
reproduced; if not, it is refused and the layer named, and one that routes past its `TopK` all the same stops the server
in its first step. No test has served them. Of {latest}:

{tried_names}

DeepSeek V1 (`DeepseekForCausalLM`) has its router tested alone, since SGLang's CPU server does not run it:
`test/stage/test_layer.py`.

## Refused

Before weights load, in one line with this reason:

{refused_rows}"""


def make_page() -> str:
    """The whole page."""
    targets = set(json.loads(JUDGED.read_text())["targets"])
    tried = sorted(targets - set(EXECUTED) - set(UNSERVED))
    reasons = dict.fromkeys(UNSERVED.values())
    classes = (
        (", ".join(f"`{name}`" for name, why in UNSERVED.items() if why == reason), reason) for reason in reasons
    )
    return TEXT.format(
        latest=LATEST,
        registered=len(targets),
        executed=len(EXECUTED),
        tried=len(tried),
        refused=len(UNSERVED),
        executed_rows=tabulate(HEADINGS, list_executed()),
        tried_names=", ".join(f"`{name}`" for name in tried),
        refused_rows=tabulate(("class", "why"), classes),
    )


def list_executed() -> Iterator[tuple[str, ...]]:
    """A row a family, by name."""
    measured, captured = read_measured(), list_captured()
    for architecture, name in sorted(EXECUTED.items(), key=lambda item: item[1].lower()):
        starts = "<br>".join(f"`{start}`" for start in ON_HUB[name].list_starts())
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
    """Write the page, or compare it; the exit code is 1 where it differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check, page = parser.parse_args().check, make_page()
    if not check:
        PAGE.write_text(page)
    elif not PAGE.exists() or PAGE.read_text() != page:
        sys.exit("families: docs/families.md is not up to date: PYTHONPATH=python:test python -m docs.families")


if __name__ == "__main__":
    main()
