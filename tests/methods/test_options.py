"""Options of all registered methods: what cannot be right for any is refused when the method is made, by name."""

import inspect
import math
from collections.abc import Iterator
from typing import Any

import pytest

import gxd
from gxd.methods.product import SELECTIONS

WRONG: list[Any] = [math.nan, [1], {}, -math.inf, object(), b"x"]


def options() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Each option of each method, and the options that it needs beside it."""
    for name, info in gxd.methods().items():
        for option in info.options:
            kinds = [kind for kind, made in SELECTIONS.items() if option in inspect.signature(made).parameters]
            yield name, option, {"selection": kinds[0]} if name == "unit_reset" and kinds else {}


@pytest.mark.parametrize(("name", "option", "beside"), list(options()))
def test_a_value_of_no_sense_is_refused_with_the_name_of_the_option(name: str, option: str, beside: dict[str, Any]):
    for wrong in WRONG:
        with pytest.raises((ValueError, TypeError)) as error:
            gxd.method(name, **beside, **{option: wrong})
        said = str(error.value)
        assert repr(wrong) in said
        assert option in said or "utility" in said, said  # of unit_reset the score is one


ENDLESS = [("l2", "strength"), ("upgd", "noise"), ("parseval", "scale"), ("spectral", "power"), ("cpr", "sharpness")]


@pytest.mark.parametrize(("name", "option"), ENDLESS)
def test_an_infinite_strength_that_would_leave_nothing_but_nan_is_refused(name: str, option: str):
    with pytest.raises(ValueError, match=f"{option}=inf must be a number"):
        gxd.method(name, **{option: math.inf})
