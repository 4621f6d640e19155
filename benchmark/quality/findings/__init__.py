"""The papers' findings, looked for in a small model: `python -m benchmark.quality.findings`."""
