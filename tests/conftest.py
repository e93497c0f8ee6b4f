"""What every test may rely on."""

import pytest

from gxd.score import utilities as score


@pytest.fixture(autouse=True)
def utilities_registered_by_a_test_are_forgotten_after_it():
    known = dict(score._REGISTRY)
    yield
    score._REGISTRY.clear()
    score._REGISTRY.update(known)
