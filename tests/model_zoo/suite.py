"""Real models, many of them: ``make test-zoo``. The name of this file keeps it out of ``make test``."""

import pytest

from tests.model_zoo.measure import measure
from tests.model_zoo.models import FACTORIES

pytestmark = [pytest.mark.zoo, pytest.mark.filterwarnings("ignore")]

KNOWN: dict[str, str] = {}  # model -> what does not work yet; a model that works again fails until it is removed here


def cases() -> list[object]:
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=KNOWN[name])) if name in KNOWN else name for name in FACTORIES
    ]


@pytest.mark.parametrize("name", cases())
def test_the_plan_of_a_real_model_holds_and_the_model_is_left_exactly_as_it_was(name: str):
    found = measure(name, FACTORIES[name])
    assert not found.error
    assert not found.damage, "\n".join(found.damage)
    assert not found.disproof, "\n".join(found.disproof)
    assert not any(word in found.check for word in ("wrong", "crashed")), found.check
    assert 0 < found.skip <= found.group <= 1


def test_the_sample_is_sixty_models_of_each_library():
    for library in ("timm", "huggingface"):
        assert sum(name.startswith(f"{library}/") for name in FACTORIES) == 60
