"""Modes of a server on which a policy does not depend: where keys and values lie, LoRA, PD disaggregation."""

import pytest

from served import host
from served.adapter import write_adapter
from served.answers import FULL, LAYERS, NEW_TOKENS, generate_staggered, policy, read_all, read_tokens, say_together
from served.eagle import select_again
from served.ranks import WIDE, XSHARE

pytestmark = pytest.mark.long
OFF, SMALL, REQUESTS = 7, 8, 16
"""Requests at once: vanilla under LoRA, at full budget, and at a budget that drops experts."""
# Slots for the prompts, 16 requests of up to 100 tokens, but not for others beside them.
HIERARCHICAL = (
    *("--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    *("--hicache-ratio", "8", "--hicache-write-policy", "write_through", "--max-total-tokens", "2048"),
)
# Requests that are taken back under pressure would keep their cache in pinned memory.
DECODE = (
    *("--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "fake"),
    *("--disaggregation-decode-retraction-backup", "cpu_tensor"),
)
NOBODY = "2.2.2.2"
"""SGLang's name for a prefill server that is none."""


def check_decodes(server, probe, plan=None, sizes=range(2, 1 + REQUESTS)):
    """Every decode of so many rows has selected as its plan does, and is counted. Returns what was recorded."""
    records, metrics = read_all(server, probe)
    calls = [call for call in records if call["mode"] == "DECODE" and call["rows"] in sizes]
    for call in calls:
        assert call["active"] == select_again(call, plan or (XSHARE if call["rows"] > SMALL else WIDE))
    assert metrics["steps policy"] == len(calls) / LAYERS > 0
    assert metrics["experts_after_total"] == sum(call["after"] for call in calls)
    return records, metrics


def test_without_a_prefix_cache_full_budget_answers_as_unpatched(small_server, prompts, served):
    server, probe, _ = small_server(*FULL, "--disable-radix-cache")
    with server:
        for _ in range(2):
            answers = generate_staggered(server, prompts)
            assert read_tokens(answers) == served("unpatched").tokens[0]
            assert all(answer["meta_info"]["cached_tokens"] == 0 for answer in answers)
        check_decodes(server, probe, WIDE)


def test_prompts_that_come_back_from_the_host_answer_as_unpatched(small_server, prompts, tmp_path, served):
    host.install(tmp_path)
    server, probe, _ = small_server(*FULL, *HIERARCHICAL)
    with server:
        first = server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for prompt in prompts:
            server.generate([prompt[::-1] * 6], max_new_tokens=1)
        again = server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        check_decodes(server, probe, WIDE)
    assert read_tokens(first) == read_tokens(again) == served("unpatched").tokens[0]
    loaded = sum(answer["meta_info"]["cached_tokens_details"]["host"] for answer in again)
    assert loaded > 100, "the device forgot the prompts"


def test_requests_with_and_without_an_adapter_share_a_batch_that_selects(small_server, tiny_model, prompts, tmp_path):
    """Adapters are of the attention: upstream's CPU path has none for experts."""
    adapter = write_adapter(tiny_model, tmp_path / "adapter", ("q_proj", "v_proj"))
    host.install(tmp_path)
    flags = policy("xshare", k0=1, add=8, by_rows={str(OFF): {"policy": "vanilla"}, str(SMALL): WIDE})
    server, probe, _ = small_server(*flags, "--lora-paths", f"adapter={adapter}", "--lora-backend", "torch_native")

    def generate(size, adapter):
        """Every other request with the adapter."""
        paths = [adapter if number % 2 else None for number in range(size)]
        return say_together(server, probe, prompts[:size], lora_path=paths)

    with server:
        bare = generate(OFF, None)
        vanilla, full, _ = (generate(size, "adapter") for size in (OFF, SMALL, REQUESTS))
        check_decodes(server, probe, sizes=(SMALL, REQUESTS))
    assert full[:OFF] == vanilla
    assert vanilla[::2] == bare[::2], "requests without an adapter"
    assert all(one != other for one, other in zip(vanilla[1::2], bare[1::2], strict=True)), "the adapter matters"


def test_a_decode_server_selects_and_at_full_budget_answers_as_without_a_policy(small_server, prompts, tmp_path):
    """The decode half of PD disaggregation never sees a prefill. SGLang's `fake` transfer takes the place of the other
    half: keys and values of a prompt are the zeros that the pool starts with, its first token follows from its id.
    """
    tokens, rids, rooms = [], [f"request-{number}" for number in range(REQUESTS)], list(range(REQUESTS))
    for name, flags in (("off", ()), ("policy", policy("xshare", k0=1, add=8, by_rows={f"1-{SMALL}": WIDE}))):
        (tmp_path / name).mkdir()
        server, probe, _ = small_server(*DECODE, *flags, scratch=tmp_path / name)
        with server:
            for size in (SMALL, REQUESTS):
                prefill = {"rid": rids[:size], "bootstrap_host": NOBODY, "bootstrap_room": rooms[:size]}
                answers = server.generate(prompts[:size], prefill, max_new_tokens=NEW_TOKENS, ignore_eos=True)
                tokens += [read_tokens(answers)]
            if name == "policy":
                records, metrics = check_decodes(server, probe)
    assert tokens[0] == tokens[2]
    assert {call["mode"] for call in records} == {"DECODE"}
    assert {call["rows"] > SMALL for call in records} == {True, False}
    assert metrics["steps prefill"] == 0
