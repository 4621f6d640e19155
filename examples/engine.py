"""A policy from Python: `python examples/engine.py [TRACE]` continues 16 texts with the shipped checkpoint."""

import os
import sys
from pathlib import Path

import torch
import yaml

if not torch.cuda.is_available():
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # SGLang reads it when it is imported
import sglang

HERE = Path(__file__).parent
TEXTS = (
    *("Q: 55+74 A:", "Q: 83-6 A:", "Q: 7+48 A:", "Q: 60-19 A:"),
    *("def read(", "class ", "import os", "    return "),
    *("#include <", "static int ", "#define ", "typedef "),
    *("The ", "If the ", "This module ", "Returns "),
)


def main() -> None:
    """Generate under a policy, print the texts, and write a trace if a file is given."""
    engine = sglang.Engine(
        model_path=str(HERE.parent / "checkpoints" / "qwen3-moe-tiny"),
        expert_policy="xshare",
        expert_policy_config={"k0": 1, "add": 24},  # a dict, JSON text or a JSON file
        expert_policy_trace=sys.argv[1] if len(sys.argv) > 1 else None,
        decode_log_interval=1,  # each log line waits for the device and writes the trace; the default is 40 steps
        **({} if torch.cuda.is_available() else read_flags(HERE / "cpu.yaml")),
    )
    answers = engine.generate(list(TEXTS), {"temperature": 0, "max_new_tokens": 24})
    for text, answer in zip(TEXTS, answers, strict=True):
        print(repr(text + answer["text"]))
    engine.shutdown()


def read_flags(file: Path) -> dict[str, object]:
    """Return the flags of a server's configuration file, as `Engine` names them."""
    return {name.replace("-", "_"): value for name, value in yaml.safe_load(file.read_text()).items()}


if __name__ == "__main__":  # SGLang starts its processes by importing this file again
    main()
