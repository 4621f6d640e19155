"""Which batch sizes the patched releases capture: every one up to 16 with a policy, upstream's own without."""

from functools import cache
from pathlib import Path

import pytest

from benchmark.common.paths import ROOT
from compatibility.refusals import resolve
from served.release import older_releases_take_long

GPU = ("--device", "cuda", "--attention-backend", "triton")
DRAFT = ROOT / "checkpoints" / "qwen3-moe-tiny-eagle3"
SPECULATION = {
    "without speculation": (),
    "with speculation": (
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(DRAFT)),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    ),
}
STAGE_ON = (("--expert-policy", "xshare"), ("--mask-padding-experts",))
STAGE_OFF = ((), ("--expert-policy", "vanilla"))
LARGEST = ("--cuda-graph-max-bs-decode", "10")
LISTED = ("--cuda-graph-bs-decode", "3", "7", "24")


@cache
def ask(tree: Path, model: Path, stages: tuple[tuple[str, ...], ...]) -> dict[tuple[str, ...], list[int]]:
    """The sizes that a release captures, by its arguments."""
    limits = (), LARGEST, LISTED
    asked = [(*stage, *flags, *limit) for stage in stages for flags in SPECULATION.values() for limit in limits]
    answers = resolve(tree, model, [(*GPU, *arguments) for arguments in asked])
    return dict(zip(asked, (answer["sizes"] for answer in answers), strict=True))


@pytest.fixture
def sizes(release, patched_release, tiny_model):
    """Call it with arguments for the sizes that the patched release captures."""
    return lambda *arguments: ask(patched_release(release), tiny_model, (*STAGE_ON, *STAGE_OFF))[arguments]


@older_releases_take_long
@pytest.mark.parametrize("speculation", SPECULATION)
def test_every_size_up_to_16_is_captured_up_to_the_users_largest(speculation, sizes, release):
    drafting = SPECULATION[speculation]
    for stage in STAGE_ON:
        with_stage = sizes(*stage, *drafting)
        assert set(with_stage) == {*sizes(*drafting), *range(1, 17)}
        assert with_stage == sorted(with_stage)
        assert sizes(*stage, *drafting, *LARGEST) == list(range(1, 11))
    for stage in (*STAGE_ON, *STAGE_OFF):
        assert sizes(*stage, *drafting, *LISTED) == [3, 7, 24], "the user's own list"


@older_releases_take_long
@pytest.mark.parametrize("speculation", SPECULATION)
def test_off_captures_what_the_unpatched_release_does(speculation, sizes, release, pristine_release, tiny_model):
    for arguments in (SPECULATION[speculation], (*SPECULATION[speculation], *LARGEST)):
        upstream = ask(pristine_release(release), tiny_model, ((),))[arguments]
        assert not {*range(1, 17)} <= {*upstream}
        for stage in STAGE_OFF:
            assert sizes(*stage, *arguments) == upstream
