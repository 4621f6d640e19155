"""What expert-parallel ranks have to load: exact, of live rows and selecting layers alone, on every reader's own."""

import torch

from sglang_xshare.stage.placement import Balance, Placement
from sglang_xshare.stage.record.counters import Counters, Reader
from stage.record.tally import make_tally

EXPERTS = 16
# The third layer's experts lie the other way round.
PHYSICAL = torch.stack([torch.arange(EXPERTS), torch.arange(EXPERTS), torch.arange(EXPERTS).flip(0)])
PLACEMENT = Placement(ranks=4, per_rank=4, physical=PHYSICAL)


def make_balance(layer_ids=(0, 2)):
    return Balance(PLACEMENT, layer_ids, "cpu")


def test_the_fullest_rank_for_every_reader():
    balance = make_balance()
    counters = Counters(2, "cpu", balance=balance)
    log, metrics = Reader(counters), Reader(counters)
    totals = balance.totals
    counts = balance.count(make_tally([(9, 6), (8, 2)]))
    assert counts.tolist() == [[4, 4], [4, 2]]
    found = log.read()
    assert (found.fullest_before, found.fullest_after) == (8, 6)
    balance.count(make_tally([None, (3, 1)]))
    assert log.read().fullest_before == 3
    found, layers = metrics.look()
    assert (found.fullest_before, found.fullest_after) == (11, 7)
    assert [row[-2:] for row in layers] == [[4, 4], [7, 3]]
    assert balance.totals is totals, "captured graphs count there"


def test_a_step_without_a_live_row_counts_as_none():
    """Masked logits have their top-k active even then."""
    assert not make_balance().count(make_tally([(0, 4), None])).any()
