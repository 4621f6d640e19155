"""Device functions that synchronize the programs of one launch."""

import triton
import triton.language as tl


@triton.jit
def wait_for_all(arrivals, programs) -> None:
    """Wait for all programs, two or more, which must be resident together (a cooperative launch).

    `arrivals` points at an int32, 0 before its first use. As in the grid barrier of CUDA's cooperative groups, the
    increments of one barrier add up to 2^31, so the last increment flips the top bit, and a launch of any size can
    follow.
    """
    tl.debug_barrier()
    step = tl.where(tl.program_id(0) == 0, 0x7FFFFFFF - (programs - 2), 1)
    before = tl.atomic_add(arrivals, step, sem="release")
    now = before
    while (before ^ now) >= 0:
        now = tl.atomic_add(arrivals, 0, sem="acquire")
    tl.debug_barrier()
