"""What a user can put right."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the user's, or of their machine. The text is one line that says what is wrong and what to do."""


class Elsewhere(UserError):
    """What no run can help: another process is at its directory, a file of it is damaged, its data are not there,
    memory is full. It says nothing about what was run.
    """


def first_line(error: BaseException) -> str:
    """What an error says, as far as it fits into the message of another; its kind if it says nothing."""
    said = str(error).strip()
    return said.splitlines()[0] if said else type(error).__name__
