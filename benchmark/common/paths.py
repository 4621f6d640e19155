"""Paths in this checkout."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build"
LOGS = BUILD / "logs"
RELEASES = BUILD / "releases"
"""The folder in which `scripts/fetch_release.py` unpacks SGLang releases."""
RESULTS = ROOT / "benchmark" / "results"
TRAINED = ROOT / "checkpoints" / "qwen3-moe-tiny"
"""The small trained checkpoint: 64 experts, top-8, 4 layers."""
DRAFT = ROOT / "checkpoints" / "qwen3-moe-tiny-eagle3"
TEXTS = TRAINED / "heldout"
WIDENED = BUILD / "models" / "qwen3-moe-widened"
"""The trained checkpoint with wider experts but the same outputs. `make bench` and `make demo` serve this model."""
