"""What every test may rely on."""

import gc
import multiprocessing
import os

import pytest

from gxd.methods import registry
from gxd.score import utilities as score
from tests.processes import WARM

# Ray reads its token once per process, from HOME, which one of the tests with a cluster moves.
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
gc.set_threshold(20_000, 20, 50)  # traces make millions of objects, and a process of tests lives long


@pytest.fixture(autouse=True)
def what_a_test_registers_is_forgotten_after_it():
    tables = (score._REGISTRY, registry._REGISTRY)
    known = [dict(table) for table in tables]
    yield
    for table, before in zip(tables, known):
        table.clear()
        table.update(before)


@pytest.fixture
def warm_workers(monkeypatch):
    """Workers are forked instead of spawned: the same to the code, without the seconds that each takes to import torch.

    (The tests that start ``gxd`` itself have spawned ones.)
    """
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: WARM)
