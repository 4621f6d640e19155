"""What policies cost on a running server: text forced through its own decode steps, one policy after another."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmark.common.table import Table
from benchmark.common.variant import BASELINE, parse_variant
from benchmark.quality.decoding import Decoding
from sglang_xshare.tune.measure import Bench, Measurement, agreement, compare
from sglang_xshare.tune.report import format_loss
from sglang_xshare.tune.server import Server
from sglang_xshare.tune.texts import read_samples

NOTE = """\
Text forced through the server's own decode steps, the same for all policies. Experts: active ones of a layer and step
as the server counts them, and before them those that vanilla would have woken. Loss: cross-entropy above vanilla's, in
thousandths of a nat a token, ± the standard error of the paired differences."""


def measure_running(url: str, api_key: str | None, decoding: Decoding, policies: Sequence[str]) -> Table:
    """A row a policy. The server, which has the policy it had before in the end, needs live control and custom logit
    processors, and no other traffic. Raises `PolicyError` or ValueError in one line.
    """
    server = Server(url, api_key)
    before = server.get_policy()
    layers = len(before["limits"]["moe_layers"])
    count = decoding.per_domain * len(list(decoding.texts.glob("*.txt")))
    samples, _ = read_samples(decoding.texts, server.tokenize, decoding.prompt, decoding.steps, max(count, 2))
    rows: list[list[str]] = []
    with TemporaryDirectory() as folder:
        bench = Bench(server, {"all": samples}, Path(folder) / "trace.jsonl")
        try:
            vanilla = bench.run({"policy": BASELINE}, decoding.batch, "all")
            for text in dict.fromkeys([BASELINE, *policies]):
                variant = parse_variant(text)
                print(text, flush=True)
                found = bench.run({"policy": variant.policy or BASELINE, **variant.keys}, decoding.batch, "all")
                rows.append([text, *_cells(found, vanilla, layers)])
        finally:
            server.set_policy(before)
    headings = ["policy", "vanilla's experts", "experts", "kept mass", "loss, mnats", "greedy same", "seconds"]
    note = f"{NOTE} Vanilla's is {vanilla.cross_entropy:.3f} nats a token."
    return Table(f"Quality of policies on {url}, {decoding.batch} rows a step", headings, rows, note)


def _cells(found: Measurement, vanilla: Measurement, layers: int) -> list[str]:
    experts = None if found.before is None or found.saved is None else found.before - found.saved / layers
    counted = [found.before, experts, found.kept_mass]
    digits = (1, 1, 3)
    cells = ["-" if one is None else f"{one:.{places}f}" for one, places in zip(counted, digits, strict=True)]
    return [*cells, format_loss(compare(found, vanilla)), f"{agreement(found, vanilla):.1%}", f"{found.seconds:.1f}"]
