"""Selection on a CPU as one compiled call a layer and step. Its C++ source is `csrc`, a link to `sgl-kernel/csrc`."""

from .call import Call, is_readable, prepare, select, supports
from .layout import HANDLED
from .library import SWITCH, load

__all__ = ["HANDLED", "SWITCH", "Call", "is_readable", "load", "prepare", "select", "supports"]
