"""The version of this package: of the wheel, of `sglang-xshare --version`."""

__version__ = "0.1.0"
