"""The decode half of prefill/decode disaggregation: it selects in every decode, and never sees a prefill.

SGLang's `fake` transfer takes the place of a prefill server: a prompt's keys and values are the zeros that the pool
starts with, and its first token follows from the request's id. So two servers asked alike must answer alike.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmark.common.server import Server
from served.answers import LAYERS, NEW_TOKENS, make_server, policy, read_all, read_prompts
from served.eagle import select_again
from served.release import LATEST

DECODE = ("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake")
NOBODY = "2.2.2.2"
"""SGLang's name for a prefill server that is none."""
# Requests that are taken back under pressure would keep their cache in pinned memory.
UNPINNED = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
REQUESTS, SMALL = 16, 8
"""At once: all, and as many as run at full budget."""
BUDGET = {"policy": "xshare", "k0": 1, "add": 8}
FULL = {"policy": "xshare", "k0": 1, "add": 64, "utility": "full"}


def decode(server: Server, prompts: Sequence[str]) -> list[list[int]]:
    """Greedy tokens."""
    rids = [f"request-{number}" for number in range(len(prompts))]
    prefill = {"bootstrap_host": NOBODY, "bootstrap_room": list(range(len(prompts)))}
    answers = server.generate(prompts, {"rid": rids, **prefill}, max_new_tokens=NEW_TOKENS, ignore_eos=True)
    return [answer["output_ids"] for answer in answers]


@pytest.mark.long
def test_a_decode_server_selects_and_at_full_budget_answers_as_without_a_policy(
    tiny_model: Path, patched_release, tmp_path
):
    prompts, tokens = read_prompts(tiny_model)[:REQUESTS], []
    for name, flags in (("off", ()), ("policy", policy("xshare", k0=1, add=8, by_rows={f"1-{SMALL}": FULL}))):
        (tmp_path / name).mkdir()
        flags = (*DECODE, *UNPINNED, *flags)
        server, probe, _ = make_server(tiny_model, patched_release(LATEST), flags, tmp_path / name)
        with server:
            tokens.append(decode(server, prompts[:SMALL]))
            decode(server, prompts)
            records, metrics = read_all(server, probe)
    assert tokens[0] == tokens[1]
    assert {call["mode"] for call in records} == {"DECODE"}
    calls = [call for call in records if call["rows"] > 1]
    assert {call["rows"] > SMALL for call in calls} == {True, False}
    for call in calls:
        assert call["active"] == select_again(call, BUDGET if call["rows"] > SMALL else FULL)
    assert metrics["steps policy"] == len(calls) / LAYERS
    assert metrics["steps prefill"] == 0
    assert metrics["experts_after_total"] == sum(call["after"] for call in calls)
