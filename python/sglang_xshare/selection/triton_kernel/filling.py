"""The launch that fills the slots of rows without experts, where programs of one launch cannot wait for each other."""

import triton
import triton.language as tl

from .cover import load_filler


@triton.jit(do_not_specialize=["num_rows"])
def fill_rows(topk_ids, selected, active, vanilla_active, num_rows, recipe: tl.constexpr, tile: tl.constexpr) -> None:
    """Give every slot of a row without experts one that other rows use, once all programs have routed their rows."""
    experts = tl.arange(0, tile.experts)
    exists = experts < recipe.num_experts
    s = tl.load(selected + experts, mask=exists, other=0) != 0
    voted = tl.load(vanilla_active + experts, mask=exists, other=0) != 0
    filler = load_filler(s, voted, active, experts, recipe.num_experts)
    place = tl.arange(0, 32)
    column = tl.arange(0, tile.columns)[None, :]
    for start in range(0, num_rows, 32):
        row = start + place
        rows = topk_ids + row * (recipe.columns + recipe.shared)
        first = tl.load(rows, mask=row < num_rows, other=0)
        tl.debug_barrier()  # other threads of this program read what is written now
        bare = (first < 0)[:, None] & (column < recipe.columns)
        tl.store(rows[:, None] + column, filler, mask=bare)
