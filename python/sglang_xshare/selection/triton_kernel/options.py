"""How every kernel of ours is compiled, whatever launches it."""

# Asked for, since Triton 3.9 warns of kernels that do not say; every release so far fuses unasked.
OPTIONS = {"enable_fp_fusion": True}
