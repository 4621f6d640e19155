"""Plans that a backend can compute: each backend declares the keys that it reads, and of a key of words the words."""

from collections.abc import Mapping

Handled = Mapping[str, tuple[str, ...]]
"""Key of a plan -> the words that the backend knows of the key, such as its rankings; () for a key of numbers."""


def declare(keys: str, **words: str) -> Handled:
    """Return the declaration of a backend: its keys of numbers, and the words that it knows of each other key."""
    return dict.fromkeys(keys.split(), ()) | {key: tuple(text.split()) for key, text in words.items()}
