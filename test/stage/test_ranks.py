"""Ranks that each route rows of their own (all-to-all expert parallelism): 2 and 4 processes, joined by gloo."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.common.paths import ROOT
from served.release import LATEST, make_env
from sglang_xshare import Batch, Router, Selection, build_plan, select
from sglang_xshare.stage.record.counters import AFTER, BEFORE, ROWS, STEPS
from stage.ranks import CASES, LAYERS, TOP_K, Case, Load, Model, run_experts

VANILLA = {"policy": "vanilla"}

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(scope="session")
def serve(patched_release: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Call it with a case for what each of its ranks did. All cases run in one process, which imports SGLang once."""
    folder = tmp_path_factory.mktemp("ranks")
    env = make_env(patched_release(LATEST))
    env["PYTHONPATH"] += f":{ROOT / 'test'}:{ROOT}"
    script = [sys.executable, str(Path(__file__).with_name("run_ranks.py")), str(folder)]
    done = subprocess.run(script, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return lambda case: [torch.load(folder / f"{case.name}-{rank}.pt") for rank in range(case.size)]


@dataclass(frozen=True)
class Part:
    """Rows of a load that select together: those of all `ranks`."""

    ranks: range
    hidden: torch.Tensor
    valid: torch.Tensor
    outcome: str

    def compute(self, case: Case, load: Load) -> list[tuple[torch.Tensor, Selection]]:
        """(hidden states, selection) of every layer in one process, by the reference."""
        selections: list[Selection] = []
        keys = {key: value for key, value in case.keys.items() if key != "rows"}
        plan = build_plan({"policy": case.policy, **keys} if self.outcome == "policy" else VANILLA)
        batch = Batch(self.valid if self.outcome == "policy" else None, load.draft_tokens)

        def route(number: int, hidden: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            selections.append(select(logits, plan, Router(TOP_K), batch, backend="reference"))
            return selections[-1].topk_weights, selections[-1].topk_ids

        calls = Model(route, run_experts).forward(self.hidden, None, None)
        return [(call["hidden"], selection) for call, selection in zip(calls, selections, strict=True)]


def list_parts(case: Case, load: Load) -> Iterator[Part]:
    hidden, valid = load.hidden(case.share), load.valid(case.share)
    vanilla = "prefill" if load.prefills else "observed" if case.policy == "observe" else None
    if case.keys.get("rows") != "rank":
        yield Part(range(case.size), hidden, valid, vanilla or ("policy" if len(hidden) > 1 else "min_rows"))
        return
    parts = (split(rows, load.rows(case.share), case.share) for rows in (hidden, valid))
    for rank, (own, live) in enumerate(zip(*parts, strict=True)):
        yield Part(range(rank, rank + 1), own, live, vanilla or ("policy" if len(own) > 1 else "min_rows"))


def split(rows: torch.Tensor, counts: list[int], share: int) -> list[torch.Tensor]:
    """The part of every rank."""
    return [part for own in rows.split(counts) for part in own.tensor_split(share)]


@every_case
def test_ranks_route_and_compute_as_one_process(case, serve):
    """Idle ranks with and without padding rows, uneven ones, and ranks that decode while others prefill."""
    answers = serve(case)
    lost = 0
    for number, load in enumerate(case.loads):
        for part in list_parts(case, load):
            for layer, (hidden, selection) in enumerate(part.compute(case, load)):
                calls = [answers[rank]["steps"][number][layer] for rank in part.ranks]
                weights, ids, found = (
                    torch.cat([call[name] for call in calls]) for name in ("weights", "ids", "hidden")
                )
                torch.testing.assert_close(found, hidden)
                torch.testing.assert_close(weights.sort().values, selection.topk_weights.sort().values)
                if part.outcome == "policy":
                    assert ids.eq(-1).equal(weights == 0), "what the dispatcher leaves out"
                    assert ids[ids >= 0].unique().tolist() == selection.active.nonzero().flatten().tolist()
                lost += int(selection.vanilla_active.sum() - selection.active.sum())
    assert (lost > 0) == (case.policy != "observe")


@every_case
def test_every_rank_counts_what_selected_with_it(case, serve):
    """All the same where they select together, so that one can report for all. An idle rank alone counts no forward."""
    outcomes: list[Counter[str]] = [Counter() for _ in range(case.size)]
    totals = torch.zeros(case.size, LAYERS, 9, dtype=torch.float64)
    for load in case.loads:
        for part in list_parts(case, load):
            live = int(part.valid.sum())
            for rank in part.ranks:
                if len(part.ranks) > 1 or load.requests[rank // case.share]:
                    outcomes[rank][part.outcome] += 1
            if not live or part.outcome not in ("policy", "observed"):
                continue
            for layer, (_, selection) in enumerate(part.compute(case, load)):
                counted = {STEPS: 1, BEFORE: selection.vanilla_active.sum(), AFTER: selection.active.sum(), ROWS: live}
                for column, count in counted.items():
                    totals[part.ranks, layer, column] += int(count)
    columns = [STEPS, BEFORE, AFTER, ROWS] if case.policy != "observe" else [STEPS, ROWS]
    for rank, answer in enumerate(serve(case)):
        assert answer["outcomes"] == outcomes[rank]
        assert answer["totals"][:, columns].tolist() == totals[rank][:, columns].tolist()


def test_observed_plans_are_those_of_all_rows(serve):
    """Observed and served, a policy counts the same in the first layer, but for the vanilla step of one row."""
    observing, selecting = (next(case for case in CASES if case.name == name) for name in ("two observe", "two"))
    columns = [STEPS, BEFORE, AFTER, ROWS]
    served = serve(selecting)[0]["totals"][0, columns] + torch.tensor([1, TOP_K, TOP_K, 1])
    for answer in serve(observing):
        assert answer["observed"][0][0, columns].tolist() == served.tolist()
