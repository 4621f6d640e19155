"""A server's start, as what is checked and set before its weights load asks for it."""

from functools import cached_property
from typing import Any

from ..affinity import is_asked
from ..affinity.arguments import AffinityArguments, read_affinity
from ..refusal import ExpertPolicyError
from ..upstream.server import model_config, resolved
from .arguments import Arguments, read_arguments
from .moe_model import MoeModel, read_model

PLACEMENT, STAGE, AFFINITY = "placement", "stage", "affinity"
"""Parts of the arguments: `--expert-placement`; a policy or masked padding rows; expert-affinity dispatch."""


class Start:
    """A server's start: each part is read when first asked for. `refused` names the checks that have refused it."""

    def __init__(self, server_args: Any) -> None:
        self.server_args = server_args
        self.refused: set[str] = set()

    def asks(self, part: str) -> bool:
        """Whether the server is started with this part."""
        if part == PLACEMENT:
            return getattr(self.server_args, "expert_placement", None) is not None
        return is_asked(self.server_args) if part == AFFINITY else self.parsed is not None

    @cached_property
    def parsed(self) -> Arguments | ExpertPolicyError | None:
        """The stage's flags, or why they make no schedule; None where the stage is off."""
        try:
            return read_arguments(self.server_args)
        except ExpertPolicyError as error:
            return error

    @property
    def arguments(self) -> Arguments:
        """The stage's flags; where they make no schedule, those that any policy is checked with."""
        return self.parsed if isinstance(self.parsed, Arguments) else Arguments(None)

    @cached_property
    def affinity(self) -> AffinityArguments:
        """The flags of expert-affinity dispatch. Raises `ExpertPolicyError`."""
        arguments = read_affinity(self.server_args)
        assert arguments is not None, "no flag of it is given"
        return arguments

    @cached_property
    def config(self) -> Any:
        """The resolved arguments."""
        return resolved(self.server_args)

    @cached_property
    def model(self) -> MoeModel:
        """What a schedule must fit of it. Raises `ExpertPolicyError`."""
        return read_model(model_config(self.server_args), self.server_args.model_path)
