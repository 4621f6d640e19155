"""The one error of the patch engine."""


class PatchError(Exception):
    """A refusal, one line: what, the value found, what is allowed. Nothing on disk was changed unless it says so."""
