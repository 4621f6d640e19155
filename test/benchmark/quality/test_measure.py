"""The figures of what was decoded, divergence among them, on numbers small enough to check by hand."""

from dataclasses import asdict

import pytest
import torch
from torch.nn import functional as F

from benchmark.quality import measure
from benchmark.quality.measure import Bench, Decoded, Top, compare_loss, diverge
from benchmark.quality.model import Layout, Routing
from benchmark.quality.text import Answer, Sequences
from sglang_xshare import build_plan


def decoded(right: list[list[int]], tokens_per_request: int = 1) -> Decoded:
    hits = torch.tensor(right, dtype=torch.bool)
    routing = Routing([torch.tensor([2.0, 2.0])], [torch.tensor([4.0, 4.0])], [torch.tensor([[1.0, 0.5]])])
    layout = Layout(len(right), tokens_per_request)
    return Decoded(layout, routing, 1.0 - hits.float(), hits.long(), hits, torch.tensor([], dtype=torch.bool))


def test_means_acceptance_and_agreement():
    run = decoded([[1, 0]])
    assert (run.active, run.kept_mass) == (2.0, 0.75)
    # The last hit of three is about a token beyond the draft.
    assert decoded([[1, 1, 0, 1, 0, 1], [0, 1, 1, 0, 0, 0]], tokens_per_request=3).accepted == (3 + 2 + 1 + 1) / 4
    assert measure.agreement(decoded([[1, 0, 0, 0]]), decoded([[0, 0, 0, 1]])) == 0.5, "with vanilla, not with the text"


def test_loss_and_its_error():
    nats = torch.tensor([[1.0, 3.0], [2.0, 4.0], [5.0, 3.0]])
    loss = compare_loss(nats, torch.tensor([[1.0, 2.0], [1.0, 2.0], [3.0, 3.0]]))
    # Sequences differ by 0.5, 1.5 and 1.0: mean 1, standard deviation 0.5.
    assert (loss.cross_entropy, loss.delta, loss.error) == pytest.approx((3.0, 1.0, 0.5 / 3**0.5))
    assert str(loss) == "+1.0000 ± 0.2887"
    assert measure.explain_errors([asdict(loss)]).startswith("±: the standard error over sequences")


def test_the_error_of_batches_is_larger_than_that_of_their_coupled_sequences():
    """Batches of two differ by 1, 1, 2, 2, 3, 3: their means 1, 2, 3 have a standard error of 1 / sqrt(3)."""
    nats = torch.tensor([1.0, 1.0, 2.0, 2.0, 3.0, 3.0])[:, None]
    loss = compare_loss(nats, torch.zeros_like(nats), batch=2)
    assert (loss.delta, loss.batches, loss.error) == (2.0, 3, pytest.approx(1 / 3**0.5))
    assert str(loss) == f"+2.0000 ± {4.303 / 3**0.5:.4f}"
    # A sequence without a counted token counts nowhere; the others of its batch do.
    counted = torch.tensor([True, False, True, True, True, True])[:, None]
    some = compare_loss(nats, torch.zeros_like(nats), counted, batch=2)
    assert (some.delta, some.batches) == (pytest.approx(2.2), 3)
    assert str(compare_loss(nats, torch.zeros_like(nats), batch=6)) == "+2.0000 (one batch)"
    run, vanilla = decoded([[1, 0], [0, 0]]), decoded([[1, 1], [1, 1]])
    assert measure.losses_by_batch(run, vanilla) == [0.75]


def test_bench_is_transformers_own_loss_and_finds_right_answers(model):
    with torch.inference_mode():
        tokens = torch.randint(300, (4, 15), generator=torch.Generator().manual_seed(1))
        # Tokens 8 and 9 of sequence 1 are made what the model would say; one of them is then spoilt in sequence 2.
        for place in (8, 9):
            tokens[1, place] = model(tokens[1:2, :place]).logits[0, -1].argmax()
        tokens[2] = tokens[1]
        tokens[2, 9] = (tokens[2, 9] + 1) % 300
        nats = -model(tokens).logits.log_softmax(2)[:, 6:-1].gather(2, tokens[:, 7:, None])[..., 0]
    answers = (Answer(1, 8, 10), Answer(2, 8, 10), Answer(1, 5, 8))
    bench = Bench(model, Sequences(tokens, ("a", "a", "b", "b"), answers), prompt=6)
    run = bench.run(build_plan("vanilla"), Layout(2))
    torch.testing.assert_close(run.nats, nats, rtol=1e-5, atol=1e-5)
    # The third begins in the prompt, so it does not count.
    assert (run.answers.tolist(), run.right[1, 1:3].tolist()) == ([True, False], [True, True])
    assert run.nats.shape == run.greedy.shape == (4, 8)


def test_divergence_of_the_whole_vocabulary_is_exact():
    generator = torch.Generator().manual_seed(0)
    vanilla = 3 * torch.randn(4, 6, 40, generator=generator)
    other = vanilla + torch.randn(vanilla.shape, generator=generator)
    scores = (one.double().log_softmax(2) for one in (other, vanilla))
    exact = F.kl_div(*scores, reduction="none", log_target=True).sum(2)
    ours, reference = (Top.of_logits(one, 40) for one in (other, vanilla))
    torch.testing.assert_close(diverge(reference, ours), exact, rtol=1e-4, atol=1e-5)
    assert measure.compare_top(ours, reference)["nats"] == pytest.approx(exact.mean().item(), rel=1e-4)


def test_divergence_of_few_tokens_by_hand():
    """Both tell token 3; the other tokens and what is not told are one bucket."""
    reference, other = (
        Top(torch.tensor([[ids]]), torch.tensor([[chances]]).log())
        for ids, chances in (([3, 1], [0.5, 0.3]), ([3, 0], [0.25, 0.6]))
    )
    expected = 0.5 * torch.tensor(0.5 / 0.25).log() + 0.5 * torch.tensor(0.5 / 0.75).log()
    assert diverge(reference, other).item() == pytest.approx(expected.item())
