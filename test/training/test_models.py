"""The models that are trained: the shipped one is configured as its checkpoint says, the others as they are named. What
`python -m training.train_moe --model wide`, `python -m training.train_moe --model biased`,
`python -m training.train_moe --model many128` and `python -m training.train_moe --model many512` train is built here.
"""

import json

import pytest

from training.export import untied, write_config
from training.models import MODELS, find_folder


def test_the_shipped_model_is_the_first_and_configured_as_its_checkpoint(tmp_path) -> None:
    name, recipe = next(iter(MODELS.items()))
    assert name == "qwen3"
    model = untied(recipe.new_model()).bfloat16()
    model.config.architectures = [type(model).__name__]  # as saving does
    model.config.dtype = "bfloat16"
    write_config(model.config, tmp_path)
    ours, shipped = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, find_folder(name)))
    for config in (ours, shipped):
        del config["transformers_version"]
    assert ours == shipped


@pytest.mark.parametrize("name", MODELS)
def test_another_seed_is_another_model(name: str) -> None:
    """`python -m training.train_moe --model grouped --seed 2 --steps 400`,
    `python -m training.train_moe --model many128 --seed 2 --steps 200`,
    `python -m training.train_moe --model wide --seed 2 --steps 250` and
    `python -m training.train_moe --model biased --seed 2 --steps 160` train them.
    """
    first, second, again = (MODELS[name].new_model(seed).state_dict()["lm_head.weight"] for seed in (0, 2, 2))
    assert (second == again).all()
    assert not (first == second).all()
