"""The papers' own studies, repeated on a small model: `python -m benchmark.studies [oea|xshare|lynx|moe-spec]`."""
