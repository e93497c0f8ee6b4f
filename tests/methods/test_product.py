"""The product of scores, normalisations, selections and operators: the published methods are points of it."""

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import gxd
from gxd.methods.product import SELECTIONS
from gxd.score.utilities import get_utility
from gxd.select.normalise import NORMALISATIONS
from gxd.testing.training import Net, Training, plan_of
from tests.rig import same

POINTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "continual_backprop": (
        {"utility": "contribution", "replacement_rate": 0.2, "maturity": 1, "ranking": "age"},
        {"score": "contribution", "rate": 0.2, "maturity": 1, "normalise": "age"},
    ),
    "redo": (
        {"threshold": 0.7, "every": 2},
        {
            "score": "activation",
            "selection": "threshold",
            "threshold": 0.7,
            "every": 2,
            "compensate": False,
            "decay": 0,
        },
    ),
    "regrama": (
        {"threshold": 0.7, "every": 2, "most": 0.5},
        {
            "score": "weight_gradient",
            "selection": "threshold",
            "threshold": 0.7,
            "every": 2,
            "most": 0.5,
            "outgoing": 1.0,
            "memories": "keep",
            "compensate": False,
            "decay": 0,
        },
    ),
    "snr": (
        {"most": 2, "calibrate": 2},
        {
            "score": "silence",
            "selection": "silence_test",
            "most": 2,
            "calibrate": 2,
            "compensate": False,
            "decay": 0,
        },
    ),
    "cpr": (
        {"utility": "gxd", "every": 2, "blend": 0.3},
        {
            "score": "gxd",
            "selection": "soft",
            "every": 2,
            "blend": 0.3,
            "offset": "keep",
            "memories": "keep",
            "compensate": False,
        },
    ),
}


@pytest.mark.parametrize("name", list(POINTS))
def test_a_published_method_is_a_point_of_the_product_bit_for_bit(name: str):
    own, axes = POINTS[name]
    method = gxd.method("unit_reset", **axes)
    method.name = name  # of which its random numbers are made
    expected, found = Training(gxd.method(name, **own)).run(), Training(method).run()
    assert same(found.weights, expected.weights)
    assert expected.attached is not None and expected.attached.total_resets > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "lowest_rate": {"rate": 0.3, "maturity": 0},
    "lowest_set": {"rate": 0.3, "maturity": 0},
    "threshold": {"threshold": 0.8, "every": 1},
    "lowest_fraction": {"fraction": 0.4, "every": 1},
    "silence_test": {"most": 1},
    "soft": {"every": 1, "sharpness": 1.0},
}


@pytest.mark.parametrize("selection", list(SELECTIONS))
def test_every_score_goes_with_every_normalisation_and_selection(selection: str):
    sets = selection == "lowest_set"  # of effects, and of no single unit
    scores = [name for name in gxd.utilities() if not sets or get_utility(name).effects is not None]
    for score, normalise in product(scores, NORMALISATIONS[:1] if sets else NORMALISATIONS):
        method = gxd.method("unit_reset", score=score, normalise=normalise, selection=selection, **OPTIONS[selection])
        model = Net(dropout=0.0)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.9)
        with gxd.attach(model, optimizer, method, plan=plan_of(torch.float32)) as attached:
            for number in range(3):
                generator = torch.Generator().manual_seed(number)
                x = torch.randn(4, 1, 4, 4, generator=generator)
                logits = model(x)
                y = torch.randint(0, 3, (4,), generator=generator)
                attached.observe(logits, y)
                F.cross_entropy(logits, y).backward()
                optimizer.step()
                optimizer.zero_grad()
            if selection not in ("silence_test", "threshold"):  # there are units below any other bar
                assert attached.total_resets > 0, (score, normalise)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_test_of_silence_judges_single_batches_unless_told_otherwise():
    """With averages a unit that has fired once would never be silent."""
    training = Training(gxd.method("unit_reset", score="gxd", selection="silence_test", most=2))
    with torch.no_grad():
        training.model.fc2.bias[3] = 100.0  # fires once
    training.run(stop=1)
    with torch.no_grad():
        training.model.fc2.bias[3] = -100.0
    training.run(1, 3)
    assert training.attached is not None and 3 in training.attached.last_resets["fc2"]


@pytest.mark.parametrize(
    ("options", "error", "word"),
    [
        ({"selection": "threshhold"}, ValueError, "selection='threshhold' is not one of.*Did you mean 'threshold'"),
        ({"threshold": 0.1}, TypeError, "selection='lowest_rate' has no option 'threshold'. It has rate, maturity"),
        ({"selection": "soft", "center": 1.0, "rate": 0.1}, TypeError, "selection='soft' has no option 'rate'"),
        ({"selection": "threshold", "every": -1}, ValueError, "every=-1"),
        ({"score": "gdx"}, ValueError, "unknown utility 'gdx'"),
        ({"normalise": "mean"}, ValueError, "normalise='mean'"),
        ({"outgoing": 2.0}, ValueError, "outgoing=2.0"),
        ({"decay": 1.5}, ValueError, "decay=1.5"),
        ({"selection": ["soft"]}, ValueError, r"selection=\['soft'\] is not one of"),
        ({"selection": "silence_test", "decay": 0.9}, ValueError, r"decay=0.9: SilenceTest judges single.*decay=0"),
        ({"selection": "soft", "sharpness": math.inf}, ValueError, "sharpness=inf must be a number, 0 or more"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], error: type[Exception], word: str):
    with pytest.raises(error, match=word):
        gxd.method("unit_reset", **options)


@pytest.mark.parametrize(("before", "after"), [("fresh", "initial"), ("initial", "fresh")])
def test_a_state_without_the_weights_that_a_reset_restores_or_with_some_that_it_does_not_is_refused(
    before: str, after: str
):
    """Else a method would go on with another operator than it was made with."""
    options = {"selection": "threshold", "threshold": 0.7, "every": 2}
    state = Training(gxd.method("unit_reset", incoming=before, **options)).attached.state_dict()
    resumed = Training(gxd.method("unit_reset", incoming=after, **options)).attached
    own = resumed.state_dict()
    with pytest.raises(gxd.PlanError, match=r"other options: .*\.initial\..* is (missing|not known here)"):
        resumed.load_state_dict(state)
    assert same(resumed.state_dict(), own)
