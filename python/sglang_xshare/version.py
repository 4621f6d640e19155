"""The version of this package, for the wheel and for `sglang-xshare --version`."""

__version__ = "0.2.0"
