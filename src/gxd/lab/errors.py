"""What a user can put right."""

from __future__ import annotations


class UserError(Exception):
    """A mistake of the user's, or of their machine. The text is one line that says what is wrong and what to do."""
