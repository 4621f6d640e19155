"""The version of this package: of the wheel, of `sglang-xshare --version`."""

__version__ = "0.2.0"
