"""A selection plan: which experts a batch may use, and how every row chooses among these experts."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, get_type_hints

from ..types import Router
from .keys import Key, accepts_none, as_json

UTILITIES = ("topk", "full", "squared")
BALANCES = ("literal", "fill", "level")
RANKINGS = ("router", "votes", "static")
SCOPES = ("batch", "request")
COVERAGES = ("substitute", "truncate", "own")
AUTO = "auto"
MOST_LIKELY = 63 / 64
"""The value of `acceptance` "auto" until a server has an estimate. It is the largest possible estimate, so it lowers
the utility of draft tokens least.
"""


def _key(default: Any, kind: type, help: str, **limits: Any) -> Any:
    return field(default=default, metadata={"key": Key(kind, help, **limits)})


def _share(default: float | None, help: str, **limits: Any) -> Any:
    return _key(default, float, help, low=0, high=1, above_low=True, **limits)


@dataclass(frozen=True)
class SelectionPlan:
    """The rules of a selection. They choose the batch's set S of experts, and the experts of S that each row gets.

    S starts with the warm-up of each row, which `k0` and `p` define. A plan can then add experts to S in one of three
    ways:

    * The budgets `add_per_request`, `add`, `mass` and `target_per_rank` add experts, in this order.
    * The best experts of a `ranking` join S. `budget` or `drop` decides how many.
    * The most confident rows vote for experts (`confidence`).

    `coverage`, `kmax`, `max_rank` and `rescue` decide which experts of S a row gets. `own_share` decides their weights.
    Raises ValueError naming the key, the value and what is allowed.
    """

    policy: str = "custom"
    k0: int | None = _key(0, int, "warm-up: every row's k0 best experts; null: the row's whole top-k", low=0)
    p: float = _share(1.0, "end a row's warm-up once it holds this share of the row's score; 1: never")
    beta: float | None = _key(None, float, "skip a row's experts that score below beta times its first", low=0, high=1)
    utility: str = _key(
        "topk",
        str,
        "what a row adds: its top-k scores divided by their sum (topk), the squares of these (squared), or all its "
        "scores (full)",
        choices=UTILITIES,
    )
    add_per_request: int = _key(0, int, "experts that each request adds, best first by its own utility", low=0)
    add: int = _key(0, int, "experts that the batch adds, best first by utility", low=0)
    mass: float | None = _share(None, "add experts until the selected experts hold this share of the utility")
    max_add: int | None = _key(None, int, "the most experts that mass may add; null: no limit", low=1)
    target_per_rank: int | None = _key(None, int, "experts to reach on each expert-parallel rank; see balance", low=1)
    balance: str = _key(
        "literal",
        str,
        "literal: one expert a rank in turn, up to target_per_rank x ranks in all; fill: each rank up to the target; "
        "level: each rank up to the fullest rank, at least to the target",
        choices=BALANCES,
    )
    budget: int | None = _key(None, int, "keep the warm-up and this many best of the ranking; both may overlap", low=1)
    drop: int | None = _key(None, int, "instead of budget: all voted experts except this many, the least voted", low=0)
    ranking: str = _key("router", str, "router: by utility; votes: by rows' top-k; static: by order", choices=RANKINGS)
    order: tuple[int, ...] | None = _key(
        None, tuple, "expert ids, best first, for the static ranking", words="a list of all expert ids, each once"
    )
    scope: str = _key("batch", str, "rank for the whole batch, or for each request and take the union", choices=SCOPES)
    confidence: float | None = _share(None, "voters: rows whose best score is at least this share of the row's sum")
    max_voters: int = _key(8, int, "at most this many voters, the most confident first", low=1)
    min_votes: int = _key(2, int, "an expert with this many votes is kept, and each voter's first choice", low=1)
    coverage: str = _key(
        "substitute", str, "replace unselected top-k experts, skip them, or use only the warm-up", choices=COVERAGES
    )
    kmax: int | None = _key(None, int, "experts a row may use in all; null: the model's top-k", low=1)
    max_rank: int | None = _key(None, int, "how far down its own ranking a row may substitute; null: to the end", low=1)
    rescue: bool = _key(True, bool, "with truncate: a row that is left without any expert gets its first choice back")
    free_residents: bool | None = _key(
        None, bool, "loaded experts are selected too, and no budget counts them; null: if experts are paged"
    )
    own_share: float = _key(
        0.0,
        float,
        "divide a row's weights by its scores' sum over its experts (0), over its own top-k (1), or in between",
        low=0,
        high=1,
    )
    acceptance: float = _share(
        1.0,
        "chance that a draft is accepted if all before it are; a verify row's utility is multiplied by chance ** depth",
        choices=(AUTO,),
    )
    warm_rows: int | None = _key(None, int, "only verify rows at a depth below this number have a warm-up", low=1)
    estimates: bool = False
    """True if `acceptance` was given as "auto". A server then replaces the value by its estimate."""

    def __post_init__(self) -> None:
        for name, key in KEYS.items():
            object.__setattr__(self, name, key.check(name, getattr(self, name)))
        for name, contradiction in _contradictions(self):
            raise ValueError(f"{name} = {as_json(getattr(self, name))}: must be {contradiction}")
        if isinstance(self.acceptance, str):
            object.__setattr__(self, "acceptance", MOST_LIKELY)
            object.__setattr__(self, "estimates", True)

    @property
    def adds(self) -> bool:
        """Return whether `add_per_request`, `add`, `mass` or `target_per_rank` adds experts."""
        return bool(self.add_per_request or self.add or self.mass or self.target_per_rank)

    @property
    def ranks_experts(self) -> bool:
        """Return whether the selected set consists of the warm-up and the best experts of a ranking."""
        return self.budget is not None or self.drop is not None

    # The properties below define the meaning of each value of `coverage`.

    @property
    def uses_selected(self) -> bool:
        """Return whether rows use the experts selected for the batch. Otherwise a row uses only its own warm-up."""
        return self.coverage != "own"

    @property
    def substitutes(self) -> bool:
        """Return whether a row may take selected experts that are not in its own top-k."""
        return self.coverage == "substitute"

    @property
    def takes_residents(self) -> bool:
        """Return whether loaded experts are selected without counting towards a budget.

        The result is False if the plan has a ranking, voters, coverage `own`, or `free_residents` False.
        """
        by_utility = self.uses_selected and not self.ranks_experts and self.confidence is None
        return by_utility and self.free_residents is not False

    @property
    def can_rescue(self) -> bool:
        """Return whether a row that would lose its whole top-k gets its first choice back."""
        return self.uses_selected and not self.substitutes and self.rescue and not self.warms_all

    @property
    def warms_all(self) -> bool:
        """Return whether every row has a warm-up. A warm-up always contains the row's first choice."""
        return self.k0 != 0 and self.warm_rows is None

    @property
    def divides_by_own(self) -> bool:
        """Return whether a row's weights are divided by the sum of the row's scores over its own top-k.

        Otherwise `own_share` decides the divisor. Only a model that renormalizes divides the weights.
        """
        return self.coverage == "truncate"

    @property
    def own_power(self) -> float:
        """Return the exponent `e` in the divisor of a row's weights, `own ** e * chosen ** (1 - e)`.

        `own` is the sum of the row's scores over its own top-k. `chosen` is the sum over the experts that the row gets.
        Only a model that renormalizes divides the weights.
        """
        return 1.0 if self.divides_by_own else self.own_share

    @property
    def by_depth(self) -> bool:
        """Return whether the selection depends on the depths of draft tokens."""
        return self.acceptance < 1 or self.warm_rows is not None

    def keys_beyond(self, handled: Mapping[str, tuple[str, ...]]) -> list[str]:
        """Return the keys of the plan that a backend would ignore or misread.

        `handled` contains the keys and words that the backend reads. The backend ignores a key that `handled` does not
        contain. This is harmless if the key has its default value. The backend misreads a word that `handled` does not
        list for the key. Such a word is, for example, the name of a ranking.
        """
        found = [(f.name, getattr(self, f.name), f.default) for f in fields(self) if f.name in KEYS]
        return [
            name
            for name, value, default in found
            if value not in handled.get(name, (default,)) and (isinstance(value, str) or name not in handled)
        ]

    def is_another_estimate(self, other: "SelectionPlan") -> bool:
        """Return whether the two plans differ only in `acceptance`, and this plan uses the server's estimate of it."""
        return self.estimates and replace(self, acceptance=other.acceptance) == other

    def weighs(self, tokens_per_request: int) -> bool:
        """Return whether a row's depth changes its utility. Only a request with several rows has draft tokens."""
        return self.acceptance < 1 and tokens_per_request > 1

    def warm_up(self, router: Router) -> int:
        """Return the largest number of experts in a row's warm-up."""
        return router.top_k if self.k0 is None else self.k0

    def columns(self, router: Router, exact: bool = False) -> int:
        """Return the largest number of experts that a row may use.

        If `exact` is True, some rows may be exact, and the result is at least the model's top-k.
        """
        columns = self.kmax or router.top_k
        return max(columns, router.top_k) if exact else columns

    def check(self, router: Router, num_experts: int, ranks: int = 1) -> None:
        """Raise ValueError if the plan or the router does not fit a model of `num_experts` experts on `ranks` ranks."""
        if router.top_k > num_experts:
            raise ValueError(f"top_k = {router.top_k}: must be at most the number of experts, {num_experts}")
        for key in ("num_expert_group", "quota_groups"):
            groups = getattr(router, key)
            if groups is not None and num_experts % groups:
                raise ValueError(f"{key} = {groups}: must be a divisor of the number of experts, {num_experts}")
        self.check_router(router)
        if self.warm_up(router) > router.top_k:
            raise ValueError(f"k0 = {self.k0}: must be at most the model's top-k, {router.top_k}")
        if self.k0 is None and self.columns(router) < router.top_k:
            raise ValueError(f"kmax = {self.kmax}: must be at least the warm-up, {router.top_k} experts")
        if self.order is not None and len(self.order) != num_experts:
            raise ValueError(f"order of {len(self.order)} experts: must list all {num_experts} experts once")
        if self.target_per_rank is not None and ranks < 2:
            raise ValueError(f"target_per_rank = {self.target_per_rank}: must be used with expert parallelism")

    def check_router(self, router: Router) -> None:
        """Raise ValueError if the plan does not fit the router.

        A router that does not renormalize allows no `own_share`. If the router has `quota_groups`, `kmax` must be the
        model's top-k.
        """
        if self.own_share and not router.renormalize:
            raise ValueError(f"own_share = {self.own_share}: must be used with a model that renormalizes its weights")
        if router.quota_groups is not None and self.columns(router) != router.top_k:
            reason = f"the router takes {router.top_k // router.quota_groups} experts of each group"
            raise ValueError(f"kmax = {self.kmax}: must be the model's top-k, {router.top_k}, because {reason}")


_HINTS = get_type_hints(SelectionPlan)
KEYS: Mapping[str, Key] = {
    f.name: replace(f.metadata["key"], optional=accepts_none(_HINTS[f.name]))
    for f in fields(SelectionPlan)
    if "key" in f.metadata
}


def _contradictions(plan: SelectionPlan) -> list[tuple[str, str]]:
    """Return one pair (key, text) for each key that contradicts another key. The text says what the key must be."""
    budgets = plan.adds + (plan.budget is not None) + (plan.drop is not None) + (plan.confidence is not None)
    sums_utility = plan.adds or (plan.budget is not None and plan.ranking == "router")
    other_budgets = "add, add_per_request, mass, target_per_rank"
    rules = (
        ("coverage", not plan.uses_selected and budgets > 0, "used without a budget, because rows get only a warm-up"),
        ("beta", plan.beta is not None and plan.uses_selected, "used with coverage own"),
        ("drop", plan.drop is not None and plan.budget is not None, "used without budget"),
        ("budget", plan.budget is not None and budgets > 1, f"used without {other_budgets} and confidence"),
        ("drop", plan.drop is not None and budgets > 1, f"used without {other_budgets} and confidence"),
        ("confidence", plan.confidence is not None and budgets > 1, f"used without {other_budgets}"),
        ("drop", plan.drop is not None and plan.ranking != "votes", "used with ranking votes"),
        ("ranking", plan.ranking != "router" and not plan.ranks_experts, "used with budget or drop"),
        ("scope", plan.scope != "batch" and not plan.ranks_experts, "used with budget or drop"),
        ("order", plan.order is not None and plan.ranking != "static", "used with ranking static"),
        ("ranking", plan.order is None and plan.ranking == "static", "used with order"),
        ("max_add", plan.max_add is not None and plan.mass is None, "used with mass"),
        ("balance", plan.balance != "literal" and plan.target_per_rank is None, "used with target_per_rank"),
        ("kmax", plan.kmax is not None and not plan.substitutes, "used with coverage substitute"),
        ("max_rank", plan.max_rank is not None and not plan.substitutes, "used with coverage substitute"),
        (
            "free_residents",
            bool(plan.free_residents) and not plan.takes_residents,
            "used with coverage substitute or truncate, without budget, drop and confidence",
        ),
        ("own_share", plan.own_share > 0 and plan.divides_by_own, "used with coverage substitute or own"),
        ("acceptance", plan.acceptance != 1 and not sums_utility, f"used with {other_budgets}, or budget by utility"),
        (
            "warm_rows",
            plan.warm_rows is not None and not plan.uses_selected,
            "used with coverage substitute or truncate",
        ),
        ("warm_rows", plan.warm_rows is not None and plan.k0 == 0, "used with k0 of at least 1"),
        ("rescue", not plan.rescue and (plan.substitutes or not plan.uses_selected), "used with coverage truncate"),
        ("kmax", (plan.kmax or plan.k0 or 0) < (plan.k0 or 0), f"at least k0 = {plan.k0}"),
        ("max_voters", plan.max_voters != SelectionPlan.max_voters and plan.confidence is None, "used with confidence"),
        ("min_votes", plan.min_votes != SelectionPlan.min_votes and plan.confidence is None, "used with confidence"),
    )
    return [(name, need) for name, applies, need in rules if applies]
