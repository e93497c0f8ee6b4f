"""All methods that come with gxd. A new one is a file like ``redo.py``, and a name here."""

from gxd.methods import continual_backprop, l2_init, redo

__all__ = ["continual_backprop", "l2_init", "redo"]
