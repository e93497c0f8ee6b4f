"""The row of a padding token gets no gradient, so it would keep whatever a method writes to it: none may."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gxd
from gxd.reset.fresh import distributions, fixed_rows, holding
from tests.optimizers import Lookahead

PAD, WORDS = 3, 20
X = torch.randint(4, WORDS, (8, 5), generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 3


class Vocabulary(nn.Embedding):
    """A table whose class does not say so."""


class Bag(nn.Module):
    """The sum of the vectors of all words, of which the padding's is nothing; then a hidden layer."""

    def __init__(self, kind: type[nn.Module], value: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"mode": "sum"} if kind is nn.EmbeddingBag else {}
        self.table: Any = kind(WORDS, 8, padding_idx=PAD, **options)
        self.norm, self.hidden, self.head = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.table.weight[PAD] = value

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.table(x)
        return self.head(self.hidden(self.norm(vectors.sum(1) if vectors.dim() == 3 else vectors)).relu())


# Those that write to tables; of two of them in both of their forms.
WRITES: dict[str, tuple[str, dict[str, Any]]] = {
    "full_reset": ("full_reset", {}),
    "head_reset": ("head_reset", {"head": "table"}),
    **{f"shrink {name}": ("shrink_and_perturb", {"variant": name}) for name in ("ash_adams", "kumar", "swr", "lop")},
    "shrink initial": ("shrink_and_perturb", {"variant": "initial"}),
    "l2": ("l2", {"strength": 0.5}),
    "l2 coupled": ("l2", {"strength": 0.5, "decoupled": False}),
    **{f"l2_init {norm}": ("l2_init", {"norm": norm, "strength": 0.5}) for norm in ("l2", "wasserstein")},
    **{
        f"l2_init redrawn {norm} {decoupled}": (
            "l2_init",
            {"anchor": "redrawn", "norm": norm, "strength": 0.5, "decoupled": decoupled},
        )
        for norm in ("l2", "l1", "huber", "wasserstein")
        for decoupled in (True, False)
    },
    "swr": ("swr", {"every": 1, "score": "magnitude", "factor": 0.5}),
    "swr proportional": ("swr", {"every": 1, "score": "magnitude", "selection": "proportional", "factor": 0.2}),
    "upgd": ("upgd", {"noise": 0.1, "weight_decay": 0.5}),
    "upgd unprotected": ("upgd", {"noise": 0.1, "protect": False}),
    "hare_and_tortoise": ("hare_and_tortoise", {"decay": 0.5}),
}
# Those that are for layers, and leave tables alone.
SPARES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {"strength": 0.1}) for name in ("spectral", "parseval")},
    "weight_clipping": ("weight_clipping", {"zeta": 0.01}),
    "nap": ("nap", {}),
    "fire": ("fire", {"optimizer": "keep"}),
    "dash": ("dash", {"optimizer": "keep"}),
}


def trained(
    name: str | None, options: dict[str, Any], kind: type[nn.Module] = nn.Embedding, value: float = 0.0
) -> nn.Module:
    """After some steps, the end of a task, and some more."""
    model = Bag(kind, value)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    methods = [] if name is None else [gxd.method(name, **options)]
    attached = gxd.attach(model, optimizer, *methods)
    padded = F.pad(X, (0, 2), value=PAD)
    for number in range(6):
        optimizer.zero_grad()
        F.cross_entropy(model(padded), Y).backward()
        optimizer.step()
        if number == 2:
            attached.boundary([(padded, Y)], F.cross_entropy)
    return model


@pytest.mark.parametrize("value", [0.0, 5.0])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag, Vocabulary])
@pytest.mark.parametrize("label", [*WRITES, *SPARES])
def test_the_row_of_the_padding_stays_as_it_is_and_the_others_are_treated(
    label: str, kind: type[nn.Module], value: float
):
    name, options = {**WRITES, **SPARES}[label]
    model: Any = trained(name, options, kind, value)
    assert (model.table.weight[PAD] == value).all()
    plain: Any = trained(None, {}, kind, value)
    unused = [0, 1, 2]  # no gradient reaches these words, so only a method writes to them
    same = torch.allclose(model.table.weight[unused], plain.table.weight[unused], rtol=1e-6, atol=0.0)
    never = label in ("l2_init l2", "hare_and_tortoise", "shrink initial")  # they are where these pull them
    assert same == (label in SPARES or never)


def test_padding_changes_no_output_after_a_reset():
    model: Any = trained("full_reset", {})
    torch.testing.assert_close(model(X), model(F.pad(X, (0, 4), value=PAD)))


def test_copies_of_the_weights_that_an_optimizer_keeps_have_the_old_row_too():
    model: Any = Bag(nn.Embedding, 5.0)
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), 0.1))
    attached = gxd.attach(model, optimizer, gxd.method("full_reset"))
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
        attached.boundary()
    assert (model.table.weight[PAD] == 5.0).all()


def test_a_row_that_another_module_trains_is_not_fixed():
    """The head of a language model gives a gradient to the vectors of all words."""
    one, other = nn.Embedding(5, 2, padding_idx=-1), nn.Embedding(5, 2, padding_idx=4)
    model = nn.ModuleDict({"one": one, "other": other, "norm": nn.LayerNorm(2)})
    assert fixed_rows(model) == {id(one.weight): [4], id(other.weight): [4]}
    other.weight = one.weight
    assert fixed_rows(model) == {id(one.weight): [4]}
    model["head"] = nn.Linear(2, 5)
    model["head"].weight = one.weight
    assert fixed_rows(model) == {}
    model["head"] = nn.Embedding(5, 2)
    model["head"].weight = one.weight
    assert fixed_rows(model) == {}


def test_the_distribution_of_a_table_is_that_of_the_rows_that_were_drawn():
    torch.manual_seed(0)
    table = nn.Embedding(3, 100, padding_idx=1)
    kind, scale = distributions(table)["weight"]
    assert kind == "normal"
    assert scale == pytest.approx(table.weight[[0, 2]].square().mean().sqrt().item(), rel=1e-6)
    with torch.no_grad():
        table.weight[[0, 2]] = 7.0
    assert distributions(table)["weight"] == ("constant", 7.0)


def test_rows_are_held_whatever_is_written_meanwhile():
    tensor = torch.arange(6.0).view(3, 2)
    with holding(tensor, [1]):
        tensor.zero_()
    assert tensor.tolist() == [[0.0, 0.0], [2.0, 3.0], [0.0, 0.0]]
    scalar = torch.tensor(3.0)
    with holding(scalar, []):
        scalar.zero_()
    assert scalar == 0.0
