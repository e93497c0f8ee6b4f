"""Which units are reset, and when. A selector is a value; what it remembers is a state that it returns anew."""

from gxd.select.base import Selector
from gxd.select.lowest import LowestRate
from gxd.select.threshold import Threshold

__all__ = ["LowestRate", "Selector", "Threshold"]
