"""Selection on a CPU with one compiled call for each layer and step. The folder `csrc` is a link to sgl-kernel/csrc."""

from .call import Call, find_call, is_readable, select, supports
from .counting import count_step
from .layout import HANDLED
from .library import SWITCH, load

__all__ = ["HANDLED", "SWITCH", "Call", "count_step", "find_call", "is_readable", "load", "select", "supports"]
