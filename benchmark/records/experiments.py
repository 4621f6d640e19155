"""The list of all CPU experiments, in the order in which a full run measures them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmark.common.paths import ROOT


@dataclass(frozen=True)
class Experiment:
    """An experiment, which runs `python -m <module>` and writes one record.

    - `folder`: the folder of the record, relative to the results folder.
    - `minutes`: the duration at full size, on two otherwise idle cores.
    - `small` and `arguments`: the command-line arguments at the smallest size and at full size.
    - `trained`: the arguments of `python -m training.train_moe --model` that train the experiment's model. They are
      empty if the experiment uses the shipped checkpoint.
    - `plots`: picture files next to the record that a page shows.
    """

    name: str
    module: str
    folder: str
    minutes: int
    small: str
    arguments: str = ""
    trained: str = ""
    plots: tuple[str, ...] = ()

    @property
    def model(self) -> Path | None:
        """Return the folder of the trained model, or None if the experiment uses the shipped checkpoint."""
        words = self.arguments.split()
        return ROOT / words[words.index("--model") + 1] if self.trained else None

    @property
    def kind(self) -> str:
        """Return the record's name of the experiment. It is the last part of the module name, with hyphens."""
        return self.module.rpartition(".")[2].replace("_", "-")

    def path(self, results: Path) -> Path:
        """Return the path of the record."""
        return results / self.folder / f"{self.kind}.json"

    @property
    def depends(self) -> tuple[str, ...]:
        """Return the source paths whose changes can change the results."""
        module = self.module.replace(".", "/")
        own = module if (ROOT / module).is_dir() else f"{module}.py"
        if module in OFFLINE or module.startswith("benchmark/quality"):
            return (*DECODED, own, *OFFLINE.get(module, ()))
        return (*SERVED_BY, own)


DECODED = (
    *("python/sglang_xshare/selection", "python/sglang_xshare/policies", "python/sglang_xshare/types.py"),
    *("checkpoints", "benchmark/quality"),
)
"""The source paths that can change the results of offline decoding."""
SERVED_BY = (
    *("python/sglang_xshare", "patches/shared", "patches/0.5.23", "checkpoints"),
    *("benchmark/common", "benchmark/serving", "benchmark/quality"),
)
"""The source paths that can change the results of a server."""
OFFLINE: dict[str, tuple[str, ...]] = {
    "benchmark/balance": (),
    "benchmark/paged": (),
    "benchmark/affinity": ("python/sglang_xshare/affinity",),
    "benchmark/tuning": ("python/sglang_xshare/tune",),
    "benchmark/cost": ("python/sglang_xshare/stage",),
    "benchmark/cost/ranks": ("benchmark/expert_sharding",),
    "benchmark/expert_sharding": (),
}
"""The modules that run without a server. For each, additional source paths that can change its results."""
POLICY = "xshare:k0=1,add=24"
PREFERRED = "xshare:k0=1,add=4,utility=squared,own_share=0.75"
VERIFIED = {(1, 8): (12, 9), (4, 16): (16, 13)}
"""Two budgets for each number of requests and verified tokens per request.

The first budget is used without weighting, and the second one with weighting by acceptance. Offline, both have the same
loss.
"""
CHOSEN = 3088
"""The number of tokens at the start of each held-out text on which the budgets and the presets' shares were chosen."""
CHANCES = ("0.65", "auto")
OBSERVED = "off vanilla observe --model checkpoints/qwen3-moe-tiny"
SERVED = "--rounds 1 --requests 4 --concurrency 4 --output-tokens 8 --sums 4 --per-domain 4 --loss-tokens 8"
TEXT = "--per-domain 4 --prompt 16 --steps 8 --batch 4"
DRAFTS = "--add 8 --batch 1 --tokens-per-request 8 --chance 0.75 --per-domain 4 --prompt 16 --steps 16"
UNSEEN = "--skip 32"
"""The argument that skips the first 32 sequences of each domain, because the keys of `front` were chosen on them."""
BUDGETS = "--batch 4 --per-domain 4 --prompt 16 --steps 8"
CHAINS = f"{BUDGETS} --tokens-per-request 4", "--batch 1 2 4 8 16 --tokens-per-request 4"
"""The arguments for verify steps, at the smallest size and at full size."""
FRESH = "xshare xshare:careful xshare:fast xshare:mass=0.9 --skip 32"
CAPPED = " ".join([*(f"xshare:max_add={most}" for most in (24, 32, 48, 64)), FRESH])
SIZES = {
    "decoded": f"{CAPPED} --batch 3 6 12 24 48 --per-domain 48",
    "decoded-64": f"{CAPPED} --batch 64 --per-domain 64",
    "verified-4": f"{FRESH} --batch 1 3 6 12 --per-domain 24 --tokens-per-request 4",
    "verified-8": f"{FRESH} --batch 1 3 6 12 --per-domain 24 --tokens-per-request 8",
}
STEPS = {"grouped": 400, "many128": 200, "wide": 250, "biased": 160}
"""The number of training steps of each model with another seed. These models check the default policy."""
BUDGETED = ("wide", "many128", "grouped", "biased", "many512")
DISPATCH = "--per-domain 8 --calibration 384 --replicas 2"


def _skip_chosen(length: int) -> str:
    """Return the argument that skips the first `CHOSEN` tokens of each domain. A sequence has `length` tokens."""
    return f"--skip {-(-CHOSEN // length)}"


def _vary(one: Experiment, word: str, **changes: Any) -> Experiment:
    """Return a variant of an experiment. `word` is appended to its name and to its folder."""
    return replace(one, name=f"{one.name}-{word}", folder=f"{one.folder}/{word}", **changes)


def _on(one: Experiment, model: str, seed: int = 1) -> Experiment:
    """Return the same experiment with another model. `seed` is the model's training seed."""
    made = model if seed == 1 else f"{model}-{seed}"
    trained = model if seed == 1 else f"{model} --seed {seed} --steps {STEPS[model]}"
    return _vary(one, model, arguments=f"{one.arguments} --model build/models/{made}".strip(), trained=trained)


FRONT = Experiment("front", "benchmark.quality.front", "quality/front", 6, f"{POLICY} {TEXT}", UNSEEN)
CHOICE = Experiment("defaults", "benchmark.quality.defaults", "quality", 8, BUDGETS)
SAMPLES = Experiment("samples", "benchmark.quality.samples", "quality/samples", 4, "xshare --problems 64")
SAMPLED = SAMPLES, _vary(SAMPLES, "hot", arguments="--temperature 2"), _on(SAMPLES, "grouped", seed=2)
"""The experiments that sample several answers to each arithmetic problem."""


def _fresh(model: str, sizes: str) -> Experiment:
    """Return an experiment that checks the default policy and its presets.

    It uses texts, batch sizes and models that were not used to choose the numbers of the policies.
    """
    one = Experiment("fresh", CHOICE.module, "quality/fresh", 8, f"xshare --skip 2 {BUDGETS}", SIZES[sizes])
    return _vary(_vary(one, model) if model == "shipped" else _on(one, model, seed=2), sizes)


def _with_drafts(batch: int, tokens: int) -> Experiment:
    """Return an experiment with verify steps of `batch` requests and `tokens` tokens per request.

    It compares two kinds of policies: one treats all draft tokens equally, and one weights them by acceptance.
    """
    drafts = f"--steps {tokens - 1} --draft-tokens {tokens}"
    plain, weighed = (f"xshare:k0=1,add={add},utility=squared,own_share=0.75" for add in VERIFIED[batch, tokens])
    policies = " ".join(["off --drafted off", plain, *(f"{weighed},acceptance={chance}" for chance in CHANCES)])
    counts = f"--rounds 5 --requests {4 * batch} --concurrency {batch} --output-tokens 64"
    text = f"--per-domain 8 --loss-tokens 24 --sums 40 {_skip_chosen(57)}"
    small = f"{policies} {drafts} {SERVED}"
    folder = f"serving/drafts-{batch}x{tokens}"
    arguments = f"{policies} {drafts} {counts} {text}"
    return Experiment(f"drafts-{batch}x{tokens}", "benchmark.serving", folder, 11, small, arguments)


SMALL = {
    "serving": f"off {POLICY} --drafted off xshare {SERVED}",
    "cost": f"{POLICY} --rounds 2 --step-rounds 1 --step-tokens 4",
    "exact": f"{POLICY} --exact 0 2 --rounds 1 --output-tokens 8 --loss-batches 1",
    "balance": "vanilla xshare:k0=1,target_per_rank=5 --batches 4",
    "balance-live": "xshare:k0=1,target_per_rank=5 --ep-size 2 --rounds 1 --batch 4 --steps 4",
    "tuning": f"--offline {POLICY} --settings {POLICY} --tolerances 20 --batch 4 --samples 8 --prompt 8 --tokens 8",
    "affinity": f"mixed --requests 100 --seeds 1 {DISPATCH}",
    "affinity-live": f"expert_affinity --policies {POLICY} --per-replica 4 --requests 24 --life 12 {DISPATCH}",
    "ranks": "--experts 8 --active 4 8 --batch 8 --rounds 1 --hidden 16 --width 32",
    "expert-sharding": "--alpha 0.6 --experts 8 --batch 4 --sequence 6 --hidden 16 --rounds 1",
    "depth": "off --concurrency 1 --fixed 0 1 --rounds 1 --waves 1 --settled 1 --output-tokens 8",
    "depth-changes": "xshare --from-requests 2 --changes 1 --output-tokens 8",
    "neighbours": f"{POLICY} --prompts 2 --others 3 --prompt 8 --tokens 4",
}
"""The arguments of each experiment at the smallest size."""
REPLICAS = "--traffic mixed shift flood --policies vanilla xshare:k0=1,add=16"
EXPERIMENTS = {
    one.name: one
    for one in (
        Experiment("serving", "benchmark.serving", "serving", 22, SMALL["serving"], _skip_chosen(97)),
        Experiment("quality", "benchmark.quality", "quality", 4, f"{POLICY} {TEXT}"),
        *(_with_drafts(*both) for both in VERIFIED),
        Experiment("depth", "benchmark.depth", "depth", 75, SMALL["depth"]),
        Experiment("depth-changes", "benchmark.depth.changes", "depth", 15, SMALL["depth-changes"]),
        Experiment("drafts", "benchmark.quality.drafts", "quality", 16, DRAFTS),
        FRONT,
        Experiment("paged", "benchmark.paged", "paged", 6, f"{PREFERRED} {TEXT}"),
        Experiment("paged-live", "benchmark.paged.live", "paged", 9, f"{PREFERRED} {SERVED}", _skip_chosen(81)),
        Experiment("cost", "benchmark.cost", "cost", 3, SMALL["cost"]),
        Experiment("exact", "benchmark.serving.exact", "serving", 9, SMALL["exact"]),
        Experiment("observe", "benchmark.serving", "observe", 2, f"{OBSERVED} {SERVED}", OBSERVED),
        Experiment("balance", "benchmark.balance", "balance", 1, SMALL["balance"]),
        Experiment("balance-live", "benchmark.balance.live", "balance", 6, SMALL["balance-live"]),
        Experiment("tuning", "benchmark.tuning", "tuning", 5, SMALL["tuning"], "--offline"),
        Experiment("affinity", "benchmark.affinity", "affinity", 3, SMALL["affinity"], plots=("affinity.png",)),
        Experiment("affinity-live", "benchmark.affinity.live", "affinity", 24, SMALL["affinity-live"], REPLICAS),
        Experiment("ranks", "benchmark.cost.ranks", "cost", 2, SMALL["ranks"]),
        Experiment("expert-sharding", "benchmark.expert_sharding", "expert_sharding", 4, SMALL["expert-sharding"]),
        Experiment("neighbours", "benchmark.neighbours", "neighbours", 2, SMALL["neighbours"]),
        *(_on(FRONT, model) for model in ("grouped", "wide")),
        replace(CHOICE, minutes=4),
        _vary(CHOICE, "verified", small=CHAINS[0], arguments=CHAINS[1]),
        *(_on(CHOICE, model) for model in BUDGETED),
        *(_fresh(model, sizes) for model in ("shipped", *STEPS) for sizes in SIZES),
        *SAMPLED,
    )
}
