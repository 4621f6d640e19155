"""What is asked of SGLang's process groups, by real ones of two processes."""

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

from sglang_xshare.upstream.ranks import share_first

RANK = """\
import json, sys
from types import ModuleType, SimpleNamespace
import torch
rank, store = int(sys.argv[1]), sys.argv[2]
torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
group = SimpleNamespace(world_size=2, ranks=[0, 1], cpu_group=torch.distributed.group.WORLD)
module = ModuleType("sglang.srt.runtime_context")
module.get_parallel = lambda: SimpleNamespace(tp_group=group)
sys.modules["sglang.srt.runtime_context"] = module
from sglang_xshare.upstream.ranks import share_first
print(json.dumps([share_first([0.1 + rank, 1e-9 + rank]), share_first([]), share_first([float(rank)])]))
"""


def test_all_ranks_have_the_numbers_of_the_first_to_the_last_bit(tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    told = [json.loads(rank.communicate(timeout=300)[0]) for rank in ranks]
    assert told == [[[0.1, 1e-9], [], [0.0]]] * 2


def test_one_rank_shares_with_nobody(monkeypatch):
    module = ModuleType("sglang.srt.runtime_context")
    group = SimpleNamespace(world_size=1)  # without a group to send in
    module.get_parallel = lambda: SimpleNamespace(tp_group=group)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", module)
    assert share_first([0.5]) == [0.5]
