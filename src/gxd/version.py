"""The version: the one place where it is written, read by the build and by ``gxd --version`` alike."""

__version__ = "0.1.0"
