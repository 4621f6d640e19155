"""Device functions that synchronize the programs of one launch."""

import triton
import triton.language as tl


@triton.jit
def wait_for_all(arrivals, programs) -> None:
    """Wait until all programs of the launch have called this function.

    The launch must have at least two programs. It must be cooperative, so all programs are resident at the same time.
    `arrivals` points to an int32 that is 0 before its first use. As in the grid barrier of CUDA's cooperative groups,
    the increments of one barrier add up to 2^31. The last increment therefore flips the top bit, and the next launch
    may have any number of programs.
    """
    tl.debug_barrier()
    step = tl.where(tl.program_id(0) == 0, 0x7FFFFFFF - (programs - 2), 1)
    before = tl.atomic_add(arrivals, step, sem="release")
    now = before
    while (before ^ now) >= 0:
        now = tl.atomic_add(arrivals, 0, sem="acquire")
    tl.debug_barrier()
