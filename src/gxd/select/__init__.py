"""Which units are reset, and when. A selector is a value; what it remembers is a state that it returns anew."""

from gxd.select.base import Selector
from gxd.select.fraction import LowestFraction
from gxd.select.lowest import LowestRate
from gxd.select.lowest_set import LowestSet
from gxd.select.normalise import ByAge, LayerMean, Normalise
from gxd.select.silence import SilenceTest
from gxd.select.soft import Soft
from gxd.select.threshold import Threshold

__all__ = [
    "ByAge",
    "LayerMean",
    "LowestFraction",
    "LowestRate",
    "LowestSet",
    "Normalise",
    "Selector",
    "SilenceTest",
    "Soft",
    "Threshold",
]
