"""Where keys and values lie does not matter to a policy: no prefix cache, or one that spills to the host's memory."""

import pytest

from served import host
from served.answers import NEW_TOKENS, generate_staggered, make_server, policy, read_all, read_prompts
from served.release import LATEST

pytestmark = pytest.mark.long

FULL = policy("xshare", k0=1, add=64, utility="full")
# Slots for the prompts, 16 requests of up to 100 tokens, but not for others beside them.
HIERARCHICAL = (
    *("--enable-hierarchical-cache", "--hicache-io-backend", "direct", "--hicache-mem-layout", "layer_first"),
    *("--hicache-ratio", "8", "--hicache-write-policy", "write_through", "--max-total-tokens", "2048"),
)


def test_without_a_prefix_cache_full_budget_answers_as_unpatched(tiny_model, patched_release, tmp_path, served):
    flags = (*FULL, "--disable-radix-cache")
    server, probe, _ = make_server(tiny_model, patched_release(LATEST), flags, tmp_path)
    prompts = read_prompts(tiny_model)
    with server:
        for _ in range(2):
            answers = generate_staggered(server, prompts)
            assert [answer["output_ids"] for answer in answers] == served("unpatched").tokens[0]
            assert all(answer["meta_info"]["cached_tokens"] == 0 for answer in answers)
        check_counts(server, probe)


def test_prompts_that_come_back_from_the_host_answer_as_unpatched(tiny_model, patched_release, tmp_path, served):
    host.install(tmp_path)
    server, probe, _ = make_server(tiny_model, patched_release(LATEST), (*FULL, *HIERARCHICAL), tmp_path)
    prompts = read_prompts(tiny_model)
    others = [prompt[::-1] * 6 for prompt in prompts]
    with server:
        first = server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        for prompt in others:
            server.generate([prompt], max_new_tokens=1)
        again = server.generate(prompts, max_new_tokens=NEW_TOKENS, ignore_eos=True)
        check_counts(server, probe)
    assert [answer["output_ids"] for answer in first] == served("unpatched").tokens[0]
    assert [answer["output_ids"] for answer in again] == served("unpatched").tokens[0]
    loaded = sum(answer["meta_info"]["cached_tokens_details"]["host"] for answer in again)
    assert loaded > 100, "the device forgot the prompts"


def check_counts(server, probe):
    """Every decode of two rows and more has selected."""
    records, metrics = read_all(server, probe)
    decoded = [call for call in records if call["mode"] == "DECODE" and call["rows"] > 1 and call["layer"] == 0]
    assert metrics["steps policy"] == len(decoded) > 0
