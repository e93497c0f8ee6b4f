"""One set of laws for every method, utility and selector: those that are registered, by name, and without a line here
for a new one. The laws themselves are in `gxd.testing`.
"""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import gxd
from gxd.methods.product import SELECTIONS
from gxd.testing import LAWS, Case
from gxd.testing.laws import is_compiled_alike, is_resumed_exactly
from gxd.testing.training import STEPS, Training
from tests.methods.contract import method_cases, selector_cases, selectors, utility_cases
from tests.rig import same

CASES = [*method_cases(), *utility_cases(), *selector_cases()]
TOGETHER = [case for case in CASES if case.label in (*gxd.methods(), "utility loss_gradient")]
# But for those that reset units in part: what is known of these still holds.
UNIT_METHODS = [case for case in TOGETHER if (s := getattr(case.make(), "selector", None)) is not None and not s.soft]


def test_every_method_utility_and_selector_is_covered():
    labels = {case.label for case in CASES}
    assert set(gxd.methods()) | {f"utility {name}" for name in gxd.utilities()} <= labels
    assert {f"selector {kind.__name__}" for kind in selectors()} <= labels
    assert {f"unit_reset {selection}" for selection in SELECTIONS if selection != "lowest_rate"} <= labels


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_the_law_holds(law: Callable[[Case], None], case: Case):
    law(case)


# ---- two processes


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for label, methods in [*((case.label, [case.make()]) for case in CASES), ("together", all_together())]:
        training = Training(*methods, wrap=DistributedDataParallel, rank=rank).run(stop=5)
        assert training.attached is not None
        states = training.attached.state_dict()["methods"].values()
        parameters = {name: p.detach() for name, p in training.model.named_parameters()}
        kept = [(state["state"], state["generator"]) for state in states]
        found[label] = (parameters, training.optimizer.state_dict(), kept)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("no gloo")
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_ranks_end_identical_to_the_last_bit(ranks: list[dict[str, Any]], case: Case):
    assert same(ranks[0][case.label], ranks[1][case.label])


# ---- several at once


def all_together() -> list[gxd.Method]:
    return [case.make() for case in TOGETHER]


def test_all_methods_together_are_resumed_exactly():
    is_resumed_exactly(all_together)


def test_all_methods_together_are_compiled_alike():
    """But those that need the gradients before the step: with them it is eager."""
    after = [c.make for c in TOGETHER if type(c.make()).before_step is gxd.Method.before_step]
    assert is_compiled_alike(lambda: [make() for make in after]) is None


def test_two_ranks_with_all_methods_end_identical_to_the_last_bit(ranks: list[dict[str, Any]]):
    assert same(ranks[0]["together"], ranks[1]["together"])


@pytest.mark.parametrize(("first", "second"), list(permutations(UNIT_METHODS, 2)), ids=str)
def test_what_one_method_resets_is_new_to_the_other(first: Case, second: Case):
    training = Training(first.make(), second.make())
    attached = training.attached
    assert attached is not None
    names = [part.key for part in attached._parts]
    resets = 0
    for step in range(STEPS):
        training.run(step, step + 1)
        for group, units in attached.last_resets.items():
            resets += len(units)
            for name in names:
                assert not attached.ages(name)[group][units].any()
                assert not attached.utilities(name)[group][units].any()
                assert not attached.references(name)[group][..., units].any()
        ages = [attached.ages(name) for name in names]
        assert same(*ages)
    assert resets > 0


def test_units_that_another_method_resets_are_not_eligible_again_before_they_are_mature():
    """Everything is reset every third step, so nothing is ever older than three."""
    redo = gxd.method("redo", threshold=1e9, every=3)
    for methods in permutations([redo, gxd.method("continual_backprop", replacement_rate=1.0, maturity=3)]):
        attached = Training(*methods).run().attached
        assert attached is not None
        totals = {part.method.name: part.state.total for part in attached._parts}
        assert totals == {"redo": 2 * attached.plan.size, "continual_backprop": 0}
