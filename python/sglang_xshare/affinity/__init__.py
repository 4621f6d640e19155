"""Expert-affinity dispatch: requests that want the same experts go to the same replica.

A signature tells where a request's experts lie, from its prompt's token ids by a table (`table.py`) that
`sglang-xshare calibrate` measures (`calibration.py`, `projection.py`). `dispatcher.py` decides; it knows no SGLang.
"""
