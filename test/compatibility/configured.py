"""A model's configuration as SGLang has read it."""

from types import SimpleNamespace


def model(architecture: str, **text_config: object) -> SimpleNamespace:
    names, text = SimpleNamespace(architectures=[architecture]), SimpleNamespace(**text_config)
    return SimpleNamespace(hf_config=names, hf_text_config=text, num_hidden_layers=4)
