"""``gxd leaderboard run | show | add``: every method under one protocol.

The protocol is in :mod:`gxd.lab.leaderboard.protocol`, the entries and what is tried of each in
:mod:`gxd.lab.leaderboard.entries`; docs/leaderboard.md says why.
"""

from __future__ import annotations

from gxd.lab.leaderboard.cli import command

__all__ = ["command"]
