"""Every accepted family that SGLang's CPU server runs, served for real: tiny random models, beside transformers' own.
A model that transformers lacks is served beside the release without our patches.

A family takes one server: alone a request is vanilla, by the number of requests the policy is off, its budget full, or
one that drops experts.
"""

import json
from dataclasses import dataclass
from functools import cache

import pytest

from served import recent
from served.answers import Answers, install_plugin, make_server, policy, read_all, read_lines, say_together
from served.families import answer, draw_prompts, make, read_routers, select_in_decode
from served.family import EXPERTS, FAMILIES, ON_OLDER
from served.hybrids import HYBRIDS, publish
from served.probe import read_logits
from served.recent import RECENT, VOCABULARY
from served.release import LATEST, OLDEST
from sglang_xshare import Router, build_plan, select

ALONE, OFF, FULL, BUDGET = 1, 7, 8, 16
"""Requests at once."""
TOKENS = 12
PLAN = {"k0": 1, "add": 4}
FLAGS = policy(
    "xshare", **PLAN, by_rows={str(OFF): {"policy": "vanilla"}, str(FULL): {"add": EXPERTS, "utility": "full"}}
)
CASES = [*((name, LATEST) for name in FAMILIES | HYBRIDS), *((name, OLDEST) for name in ON_OLDER)]
pytestmark = pytest.mark.long
of_transformers = pytest.mark.parametrize(("name", "release"), CASES)
every_family = pytest.mark.parametrize(("name", "release"), [*CASES, *((name, LATEST) for name in RECENT)])


@dataclass(frozen=True)
class Run:
    """A family's answers: the server's to each number of requests, and transformers' or the pristine release's."""

    server: Answers
    routers: dict[int, Router]
    vanilla: list[list[int]]
    """To as many requests as the most."""
    selecting: list[list[int]] | None
    """The same under the budget; None without transformers."""

    def tokens(self, requests):
        """The server's answers."""
        return self.server.tokens[(ALONE, OFF, FULL, BUDGET).index(requests)]

    def calls(self, requests):
        """The decode calls of its MoE runner."""
        return self.server.calls("DECODE", requests, requests)

    def select(self, call, **keys):
        """What a policy selects in a recorded call, by the reference."""
        plan = build_plan({"policy": "xshare", **PLAN, **keys})
        return select(read_logits(call), plan, self.routers[call["layer"]], backend="reference")


@pytest.fixture(scope="session")
def run(tiny_model, patched_release, pristine_release, tmp_path_factory):
    """Call it with the names of a family and a release: each is served once, and alone."""

    def answer_pristine(name, flags, scratch):
        """Write a model that transformers lacks. Returns the answers of the release as published."""
        (scratch / "model").mkdir()
        (scratch / "model" / "config.json").write_text(json.dumps(dict(RECENT[name].config)))
        for folder in (scratch, scratch / "pristine"):
            install_plugin(folder, "served.recent:lend")
        tree = pristine_release(LATEST)
        server, probe, _ = make_server(scratch / "model", tree, flags, scratch / "pristine", RECENT[name].env)
        with server:
            return say_together(server, probe, draw_prompts(VOCABULARY, BUDGET), TOKENS)

    @cache
    def serve(name, release):
        scratch, selecting = tmp_path_factory.mktemp("family"), None
        flags = ("--tokenizer-path", str(tiny_model))
        if name in RECENT:
            env, routers = RECENT[name].env, {layer: RECENT[name].read_router(layer) for layer in RECENT[name].layers}
            flags, prompts = (*flags, *recent.FLAGS, *RECENT[name].flags), draw_prompts(VOCABULARY, BUDGET)
            vanilla = answer_pristine(name, flags, scratch)
        else:
            family = (FAMILIES | HYBRIDS)[name]
            model = make(family, scratch / "model")
            publish(family, scratch / "model")
            env, routers, flags = family.env, read_routers(family, model), (*flags, *family.flags)
            prompts = draw_prompts(model.config.vocab_size, BUDGET)
            vanilla = answer(model, prompts, TOKENS)
            with select_in_decode(family, model, build_plan("xshare", **PLAN), rows=BUDGET):
                selecting = answer(model, prompts, TOKENS)
        server, probe, trace = make_server(scratch / "model", patched_release(release), (*FLAGS, *flags), scratch, env)
        with server:
            tokens = [say_together(server, probe, prompts[:size], TOKENS) for size in (ALONE, OFF, FULL, BUDGET)]
            records, metrics = read_all(server, probe, min(routers))
            served = Answers(tokens, 0, records, metrics, read_lines(trace), server.log_text(), {})
        return Run(served, routers, vanilla, selecting)

    return serve


@every_family
def test_without_selecting_and_at_full_budget_it_answers_as_without_a_policy(name, release, run):
    family = run(name, release)
    assert len({token for answer in family.vanilla for token in answer}) > 60, "answers too poor to tell anything"
    for size in (ALONE, OFF, FULL):
        assert family.tokens(size) == family.vanilla[:size]
        for call in family.calls(size):
            assert call["active"] == family.select(call).vanilla_active.nonzero().flatten().tolist()


@every_family
def test_at_a_budget_it_answers_as_transformers_with_the_reference_selection(name, release, run):
    family = run(name, release)
    assert family.selecting is None or family.tokens(BUDGET) == family.selecting
    assert family.tokens(BUDGET) != family.vanilla
    assert {call["layer"] for call in family.calls(BUDGET)} == set(family.routers)
    for call in family.calls(BUDGET):
        selection = family.select(call)
        assert call["active"] == selection.active.nonzero().flatten().tolist()
        assert call["after"] < selection.vanilla_active.sum()


@of_transformers
def test_every_layer_and_step_is_counted(name, release, run):
    family = run(name, release)
    calls = family.calls(FULL) + family.calls(BUDGET)
    selections = [family.select(call, **({"add": EXPERTS} if call["rows"] == FULL else {})) for call in calls]
    assert [call["layer"] for call in calls] == list(family.routers) * (len(calls) // len(family.routers))
    seen = [
        {
            "step": number // len(family.routers),
            "phase": "decode",
            "layer": call["layer"],
            "batch_size": call["rows"],
            "experts_before": int(selection.vanilla_active.sum()),
            "experts_after": call["after"],
            "kept_mass": pytest.approx(float(selection.kept_mass.mean()), rel=1e-5),
        }
        for number, (call, selection) in enumerate(zip(calls, selections, strict=True))
    ]
    assert family.server.trace == seen
    metrics = family.server.metrics
    assert metrics["layer_steps_total"] == len(calls) > 0
    assert metrics["experts_before_total"] == sum(record["experts_before"] for record in seen)
    assert metrics["experts_after_total"] == sum(call["after"] for call in calls)
    assert metrics["kept_mass_total"] == pytest.approx(sum(float(out.kept_mass.sum()) for out in selections), rel=1e-5)
    steps = {size: len(family.calls(size)) // len(family.routers) for size in (ALONE, OFF, FULL, BUDGET)}
    assert metrics["steps policy"] == steps[FULL] + steps[BUDGET]
    assert metrics["steps override"] == steps[OFF]
    assert metrics["steps min_rows"] == steps[ALONE] > 0
