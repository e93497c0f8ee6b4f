"""Docstrings as the site's generator reads them: roles become links, names that share a line get a line each."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data):`~?([\w.]+)`")
SHARED = re.compile(r"^( +)((?:\w+, )+\w+): (.*(?:\n\1 +.*)*)", re.M)


class Docstrings(griffe.Extension):
    """Rewrites every docstring once, before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """A function, class, attribute or module was read."""
        if obj.docstring is not None:
            obj.docstring.value = rewritten(obj.docstring.value)


def rewritten(text: str) -> str:
    """The same in Markdown."""
    text = SHARED.sub(lambda m: "\n".join(f"{m[1]}{name}: {m[3]}" for name in m[2].split(", ")), text)
    text = ROLE.sub(r"`\1`", text)
    return re.sub(r"^( *)(\w.*)::$", r"\1\2:", text, flags=re.M)
