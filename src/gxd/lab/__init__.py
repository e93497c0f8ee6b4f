"""The lab: the paper's experiments on top of the library, and the command ``gxd``."""
