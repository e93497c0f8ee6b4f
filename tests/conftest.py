"""What every test may rely on."""

import multiprocessing

import pytest

from gxd.score import utilities as score
from tests.processes import WARM


@pytest.fixture(autouse=True)
def utilities_registered_by_a_test_are_forgotten_after_it():
    known = dict(score._REGISTRY)
    yield
    score._REGISTRY.clear()
    score._REGISTRY.update(known)


@pytest.fixture
def warm_workers(monkeypatch):
    """Workers are forked instead of spawned: the same to the code, without the seconds that each takes to import torch.

    (The tests that start ``gxd`` itself have spawned ones.)
    """
    monkeypatch.setattr(multiprocessing, "get_context", lambda method=None: WARM)
