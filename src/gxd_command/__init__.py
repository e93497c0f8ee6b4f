"""The command ``gxd``, outside the package: Ctrl-C is one line from the start, while torch is still being imported."""

import sys


def main() -> int:
    """Run one command and return its exit code."""
    try:
        from gxd.lab.cli import main as run
    except KeyboardInterrupt:
        print("gxd: interrupted before anything was done", file=sys.stderr)
        return 130
    return run()
