"""What triton_kernels' matmul reads of a routing, transcribed in plain loops, and cases for it."""

import torch

BLOCK_SIZES = (16, 32, 64, 128)
CASES = ["random", "tied", "padded", "holes", "one expert", "repeated", "nothing"]


def draw_routing(case: str, rows: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids [rows, top_k] int32 in descending weight, and weights float32, as a selection leaves them."""
    draw = torch.Generator().manual_seed(1000 * rows + experts + len(case))
    logits = torch.randn(rows, experts, generator=draw)
    if case == "tied":
        logits = logits.round()
    if case == "one expert":
        logits[:, experts // 2] = 50.0
    values, ids = logits.topk(top_k)
    weights, ids = values.softmax(-1), ids.int()
    if case == "padded":
        weights[1::3], ids[1::3] = 0.0, -1
    elif case == "holes":  # the last slots of a row, as many in each row as its draw
        empty = torch.arange(top_k) > torch.randint(0, top_k, (rows, 1), generator=draw)
        ids, weights = ids.masked_fill(empty, -1), weights.masked_fill(empty, 0.0)
    elif case == "repeated":  # filled slots hold the row's first expert
        ids[:, 1:], weights[:, 1:] = ids[:, :1], 0.0
    elif case == "nothing":
        ids, weights = torch.full_like(ids, -1), torch.zeros_like(weights)
    return ids, weights


def reference(
    ids: torch.Tensor, weights: torch.Tensor, experts: int, dtype: torch.dtype, renumber: bool
) -> dict[str, torch.Tensor]:
    """Return the fields of `RoutingArrays`, each found by a loop of its own."""
    rows, top_k = ids.shape
    pairs = []  # (expert, row, pair, weight)
    for row in range(rows):
        order = list(range(top_k))
        if renumber:
            order.sort(key=lambda slot: (int(ids[row, slot]) if ids[row, slot] >= 0 else experts, slot))
        pairs += [
            (int(ids[row, slot]), row, row * top_k + number, float(weights[row, slot]))
            for number, slot in enumerate(order)
            if ids[row, slot] >= 0
        ]
    pairs.sort(key=lambda pair: (pair[0], pair[2]))
    empty = rows * top_k - len(pairs)
    counts = [sum(pair[0] == expert for pair in pairs) for expert in range(experts)]
    by_row = [-1] * (rows * top_k)
    for place, pair in enumerate(pairs):
        by_row[pair[2]] = place
    schedules, block_starts = [], []
    for size in BLOCK_SIZES:
        blocks = [(expert, block) for expert, count in enumerate(counts) for block in range(-(-count // size))]
        schedules.append([(block << 16) + expert for expert, block in blocks] + [-1] * (rows * top_k - len(blocks)))
        block_starts.append([sum(block[0] < expert for block in blocks) for expert in range(experts + 1)])
    whole = {
        "histogram": counts,
        "starts": [sum(counts[:expert]) for expert in range(experts + 1)],
        "block_starts": block_starts,
        "schedule": schedules,
        "by_expert": [pair[2] for pair in pairs] + [-1] * empty,
        "by_row": by_row,
        "rows": [pair[1] for pair in pairs] + [0] * empty,
    }
    gates = torch.tensor([pair[3] for pair in pairs] + [0.0] * empty).to(dtype)
    return {name: torch.tensor(value, dtype=torch.int32) for name, value in whole.items()} | {"gates": gates}
