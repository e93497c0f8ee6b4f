"""What every test may rely on."""

import pytest

from gxd.methods import registry
from gxd.score import utilities as score


@pytest.fixture(autouse=True)
def what_a_test_registers_is_forgotten_after_it():
    tables = (score._REGISTRY, registry._REGISTRY)
    known = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, known):
        table.clear()
        table.update(before)
