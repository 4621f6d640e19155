"""What expert-parallel ranks have to load: exact, of live rows and selecting layers alone, on every reader's own."""

import torch

from sglang_xshare.stage.evidence.balance import Balance, BalanceReader, RankLoad, format_balance
from sglang_xshare.stage.placement import Placement
from stage.evidence.tables import make_tables

EXPERTS = 16
# The third layer's experts lie the other way round.
PHYSICAL = torch.stack([torch.arange(EXPERTS), torch.arange(EXPERTS), torch.arange(EXPERTS).flip(0)])
PLACEMENT = Placement(ranks=4, per_rank=4, physical=PHYSICAL)


def make_balance(layer_ids=(0, 2)):
    return Balance(PLACEMENT, layer_ids, "cpu")


def test_the_fullest_rank_and_the_mean_of_all():
    balance = make_balance()
    log, metrics = BalanceReader(balance), BalanceReader(balance)
    counts = balance.count(make_tables([(9, 6), (8, 2)]))
    assert counts.tolist() == [[1, 4, 4, 2.25, 1.5], [1, 4, 2, 2, 0.5]]
    assert log.read() == RankLoad(2, 8, 6, 4.25, 2)
    balance.count(make_tables([None, (3, 1)]))
    assert log.read() == RankLoad(1, 3, 1, 0.75, 0.25)
    assert metrics.read() == RankLoad(3, 11, 7, 5, 2.25)


def test_a_step_without_a_live_row_counts_as_none():
    """Masked logits have their top-k active even then."""
    balance = make_balance()
    assert not balance.count(make_tables([(0, 4), None])).any()
    assert format_balance(BalanceReader(balance).read()) == ""
