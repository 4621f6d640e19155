"""The papers' findings: their arithmetic on numbers known beforehand, and all of them on a small random model."""

import json

import pytest
import torch
from quality.test_measure import decoded

from benchmark.quality.findings import __main__ as command
from benchmark.quality.findings import overlap, per_request, tree_size
from benchmark.quality.findings.finding import Study
from benchmark.quality.findings.ladder import measure_gap
from benchmark.quality.model import Layout, router_logits
from benchmark.quality.text import load_sequences
from sglang_xshare import build_plan, select


@pytest.fixture
def study(checkpoint, model):
    return Study(model, load_sequences(checkpoint / "heldout", checkpoint, length=81, per_domain=4), 16, Layout(4, 4))


def test_gap_is_to_the_line_between_the_neighbours():
    vanilla = decoded([[1, 1, 1, 1], [1, 1, 1, 1]])
    low = decoded([[0, 0, 0, 0], [0, 0, 1, 1]], active=2.0)
    high = decoded([[1, 1, 1, 0], [1, 1, 1, 1]], active=6.0)
    gap = measure_gap(decoded([[1, 1, 1, 1], [1, 1, 0, 0]], active=3.0), [high, low], vanilla)
    # A quarter of the way up, the ladder loses 1 - 0.1875 and 0.5 - 0.125 nats, the policy 0 and 0.5.
    assert gap is not None
    assert gap.loss.delta == pytest.approx((-0.8125 + 0.125) / 2)
    assert gap.agreement == pytest.approx(0.75 - (0.25 + 0.25 * (0.875 - 0.25)))


@pytest.mark.parametrize("active", [1.9, 6.1])
def test_no_gap_beyond_the_ladder(active):
    rungs = [decoded([[1], [0]], active=experts) for experts in (2.0, 6.0)]
    assert measure_gap(decoded([[1], [1]], active=active), rungs, rungs[0]) is None


def test_pairs_are_of_their_kind():
    domains = ("a",) * 3 + ("b",) * 3
    following, third, domain, other = overlap._draw_pairs(domains, prompt=5, length=20)
    for pairs, distance in ((following, 1), (third, 3)):
        assert torch.equal(pairs.left[:, 0], pairs.right[:, 0])
        assert (pairs.right[:, 1] - pairs.left[:, 1] == distance).all()
        assert pairs.left[:, 1].min() == 5
        assert pairs.right[:, 1].max() < 20
    assert (domain.left[:, 0] != domain.right[:, 0]).all()
    assert (domain.left[:, 0] // 3 == domain.right[:, 0] // 3).all()
    assert (other.left[:, 0] // 3 != other.right[:, 0] // 3).all()


@torch.inference_mode()
def test_tree_holds_the_text_and_the_best_other_guesses(study):
    """Every node routes as the last token of the sequence that leads to it."""
    depth, branch, prompt = 3, 3, study.prompt
    tokens = study.sequences.tokens[:2]
    logits = tree_size._tree_logits(study, tokens, branch, depth)
    guesses = study.model(tokens[:, : prompt + depth - 1]).logits[:, prompt - 1 :]
    for row, level in ((row, level) for row in range(2) for level in range(depth)):
        text = tokens[row, prompt + level]
        ranked = [token for token in guesses[row, level].argsort(descending=True) if token != text]
        for place, node in enumerate([text, *ranked[: branch - 1]]):
            path = torch.cat([tokens[row, : prompt + level], node[None]])
            expected = router_logits(study.model, path[None])[:, 0, -1]
            torch.testing.assert_close(logits[:, row, level * branch + place], expected, rtol=1e-4, atol=1e-4)


def test_active_experts_of_a_tree(study):
    logits = torch.randn(2, 3, 8, 16, generator=torch.Generator().manual_seed(0))
    vanilla = [select(tree, build_plan("vanilla"), study.router).active.sum().item() for tree in logits.flatten(0, 1)]
    assert tree_size._union(logits, study.router.top_k) == pytest.approx(sum(vanilla) / 6)
    assert tree_size._budgeted(logits, study, budget=6) <= 6 < tree_size._union(logits, study.router.top_k)
    assert tree_size._share_of_best(torch.tensor([[[[0.0, 0.0], [50.0, 0.0]]]]), 1) == pytest.approx(0.75)


def test_majority_leaves_a_tie_open():
    assert per_request._majority([True, True, None]) is True
    assert per_request._majority([False, False, True]) is False
    assert per_request._majority([True, None, None]) is None
    assert per_request._majority([]) is None


def test_a_policy_is_run_once(study):
    first = study.verify("xshare:k0=1,add=2")
    assert study.verify("xshare:k0=1,add=2") is first
    mixed = study.verify("xshare:k0=1,add=2", mixed=True)
    assert mixed.active != first.active


def test_command_finds_everything(checkpoint, tmp_path, capsys):
    arguments = ["--model", str(checkpoint), "--per-domain", "4", "--batch", "4", "--prompt", "16"]
    findings = {}
    # The largest tree takes 128 tokens; the others would take minutes with as many.
    for names, steps in ((("overlap", "tree-size"), "128"), (("per-request", "mixed-batch"), "16")):
        command.main([*names, *arguments, "--steps", steps, "--out", str(tmp_path)])
        findings |= json.loads((tmp_path / "findings.json").read_text())["points"]
    assert list(findings) == list(command.FINDINGS)
    assert all(one["verdicts"] for one in findings.values())
    for name in findings:
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "The papers' claims" in printed
    active = findings["tree-size"]["numbers"]["active"]
    assert active["chain"]["1"] == 4.0
    assert active["independent tokens"]["2"] == pytest.approx(16 * (1 - 0.75**2))
    vanilla = findings["per-request"]["numbers"][0]
    assert vanilla["policy"] == "vanilla"
    assert vanilla["loss"]["delta"] == 0
    assert vanilla["kept_mass"] == 1


def test_command_names_an_unknown_finding():
    with pytest.raises(SystemExit, match="finding 'overlaps':"):
        command.main(["overlaps"])
