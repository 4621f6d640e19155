"""A server whose model passes the stage by stops, and says so."""

import time

import pytest
import requests

from served.answers import NEW_TOKENS, SERVERS, make_server, read_prompts
from served.release import LATEST


def test_layer_that_bypasses_the_stage_stops_the_server(tiny_model, patched_release, tmp_path):
    server, _, _ = make_server(
        tiny_model, patched_release(LATEST), SERVERS["xshare"], tmp_path, {"EXPERT_PROBE_BYPASS": "2"}
    )
    with server:
        with pytest.raises(requests.RequestException):
            server.generate(read_prompts(tiny_model), max_new_tokens=NEW_TOKENS)
        deadline = time.monotonic() + 60
        while server.returncode() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.returncode() not in (None, 0)
    line = "PolicyBypassed: MoE layers [2] did not route through the expert policy in a decode step"
    assert server.log_text().count(line) == 1
