"""Paths in this checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
RELEASES = BUILD / "releases"
"""SGLang releases that `scripts/fetch_release.py` unpacks."""
RESULTS = ROOT / "benchmark" / "results"
TRAINED = ROOT / "checkpoints" / "qwen3-moe-tiny"
"""The small trained checkpoint: 64 experts, top-8, 4 layers."""
DRAFT = ROOT / "checkpoints" / "qwen3-moe-tiny-eagle3"
TEXTS = TRAINED / "heldout"
WIDENED = BUILD / "models" / "qwen3-moe-widened"
"""The trained checkpoint with wider experts and the same function, which `make bench` and `make demo` serve."""
