"""Models that look at values, hide their layers, or are not there yet: what can be traced is, and the rest says why."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.utils.checkpoint import checkpoint

import gxd
from tests.rig import Gate

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.fc3 = nn.Linear(4, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.log: list[object] = []

    def look(self, h: Tensor) -> Tensor:
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(self.fc2(self.look(self.fc1(x).relu())).relu())


class Asserts(Net):
    def look(self, h):
        assert (h >= 0).all() and not h.isnan().any(), "not finite"
        if torch.isinf(h).any():
            raise ValueError("not finite")
        if h.mean().item() > 1e6:
            raise ValueError("too large")
        return h


class Logs(Net):
    def look(self, h):
        self.log.append(h.mean().item())
        print(f"mean {h.mean().item():.3f}, max {float(h.max())}")
        logging.getLogger(__name__).debug("norm %s", h.norm().item())
        return h


class Measures(Net):
    """A statistic that nothing comes of."""

    def look(self, h):
        with torch.no_grad():
            norm = h.norm(dim=1).mean()
        self.log.append(norm.item())
        return h


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.no_grad():
            y = x * 2
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class OwnFunction(Net):
    def look(self, h):
        return Doubles.apply(h)


@pytest.mark.parametrize("kind", [Net, Asserts, Logs, Measures, OwnFunction], ids=lambda kind: kind.__name__)
def test_a_forward_that_only_looks_at_its_values_has_the_plan_of_one_that_does_not(kind):
    model = kind()
    plan = gxd.find_units(model, X)
    assert [group.name for group in plan.groups] == ["fc1", "fc2"]
    assert not model.log


class Scales(Net):
    def look(self, h):
        return h / h.max().item()


class ScalesByFloat(Net):
    def look(self, h):
        return h / (float(h.max()) + 1)


class ScalesByArithmetic(Net):
    def look(self, h):
        assert h.sum() > -1  # the values have to be known
        return h * (2 * h.max().item() + 1)


class Keeps(Net):
    """An auxiliary loss, which the training loop picks up."""

    def look(self, h):
        self.penalty = h.square().mean()
        return h


@pytest.mark.parametrize("kind", [Scales, ScalesByFloat, ScalesByArithmetic, Keeps], ids=lambda kind: kind.__name__)
def test_a_number_that_goes_back_into_the_computation_or_is_kept_counts_as_a_reader(kind):
    plan = gxd.find_units(kind(), X)
    assert [group.name for group in plan.groups] == ["fc2"]
    assert "over several units" in next(s.reason for s in plan.skipped if s.name == "fc1")


class BranchesOnANumber(Net):
    def look(self, h):
        return h * 2 if h.sum().item() > 1 else h


class BranchesInAnIf(Net):
    def look(self, h):
        if h.sum() > 1:
            h = h * 2
        return h


@pytest.mark.parametrize("kind", [Gate, BranchesOnANumber, BranchesInAnIf], ids=lambda kind: kind.__name__)
def test_a_path_that_depends_on_values_cannot_be_traced_and_the_failure_is_one_message(kind, capfd):
    with pytest.raises(gxd.TraceError, match="data-dependent") as caught:
        gxd.find_units(kind(), X)
    assert caught.value.__cause__ is None
    assert capfd.readouterr() == ("", "")


class Policy(Net):
    """As RL libraries have them."""

    def forward(self, x):
        h = self.fc2(self.fc1(x).tanh()).tanh()
        logits = self.fc3(h)
        categorical, normal = Categorical(logits=logits), Normal(logits, torch.ones(3), validate_args=True)
        action = categorical.sample()
        return action, categorical.log_prob(action), normal.rsample(), normal.log_prob(logits.detach())


def test_policies_that_make_distributions_are_traced_in_silence(capfd):
    validates = torch.distributions.Distribution._validate_args
    plan = gxd.find_units(Policy(), X)
    assert [group.name for group in plan.groups] == ["fc1", "fc2"]
    assert capfd.readouterr() == ("", "")
    assert torch.distributions.Distribution._validate_args is validates


class Recomputes(Net):
    def forward(self, x):
        h = checkpoint(lambda x: self.fc2(self.fc1(x).relu()), x, use_reentrant=True)
        return self.fc3(F.relu(h))


def test_a_region_recomputed_by_reentrant_checkpointing_is_left_out_alone():
    """Its layers run without gradients, so that nothing can be observed; what lies behind it can."""

    class Behind(Recomputes):
        def __init__(self):
            super().__init__()
            self.fc4 = nn.Linear(3, 2)

        def forward(self, x):
            return self.fc4(super().forward(x).tanh())

    plan = gxd.find_units(Behind(), X)
    assert [group.name for group in plan.groups] == ["fc3"]
    reasons = {s.name: s.reason for s in plan.skipped}
    assert all("no_grad" in reasons[name] and "use_reentrant=True" in reasons[name] for name in ("fc1", "fc2"))


def test_a_plan_that_is_asked_for_without_gradients_is_the_same():
    with torch.no_grad():
        plan = gxd.find_units(Net(), X)
    assert plan.fingerprint() == gxd.find_units(Net(), X).fingerprint()


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.norm, self.middle = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6, bias=False)
        self.norm2, self.heads, self.aux = nn.BatchNorm1d(6), nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 2)]), None
        self.aux = nn.Linear(8, 1)

    def forward(self, x: Tensor, task: int = 0, aux: bool = False) -> object:
        h = self.norm(self.body(x)).relu()
        out = self.heads[task](self.norm2(self.middle(h)).relu())
        return (out, self.aux(h)) if aux else out


CALLS = [X, (X, 1), {"x": X, "task": 0, "aux": True}]


def test_what_a_call_does_not_run_is_named_as_unseen():
    plan = gxd.find_units(Heads(), X)
    assert plan.unseen == ("heads.1", "aux")
    assert {s.name: s.reason for s in plan.skipped}["aux"].startswith("not called in the traced forward")


def test_several_calls_make_one_plan():
    plan = gxd.find_units(Heads(), CALLS)
    assert plan.unseen == ()
    assert {g.name: sorted(c.module for c in g.consumers) for g in plan.groups} == {
        "body": ["aux", "middle"],
        "middle": ["heads.0", "heads.1"],
    }
    assert [n.module for n in plan["body"].norms] == ["norm"]
    assert plan["body"].approximate == ()  # the running mean of norm2 takes what a missing bias cannot


@pytest.mark.parametrize("call", range(3))
def test_a_reset_by_the_joint_plan_cuts_the_units_off_in_every_call(call):
    model = Heads().eval()
    plan = gxd.find_units(model, CALLS)
    gxd.reset_units(model, plan, {"body": [1, 4], "middle": [2]})
    args, kwargs = gxd.plan.find.call_arguments(CALLS[call])
    before = model(*args, **kwargs)
    with torch.no_grad():
        model.body.weight[[1, 4]] += 1
        model.middle.weight[2] += 1
    torch.testing.assert_close(model(*args, **kwargs), before, rtol=0, atol=0)


def test_the_check_goes_through_all_calls():
    model = Heads()
    report = gxd.verify_plan(model, CALLS)
    assert {g.name: g.status for g in report.groups} == {"body": "passed", "middle": "passed"}
    wrong = gxd.verify_plan(model, CALLS, plan=gxd.find_units(model, X))  # which does not know of the auxiliary head
    assert wrong["body"].status == "wrong"


def test_the_order_of_the_calls_does_not_matter():
    one, other = gxd.find_units(Heads(), CALLS), gxd.find_units(Heads(), CALLS[::-1])
    assert {g.name: {c.module for c in g.consumers} for g in one.groups} == {
        g.name: {c.module for c in g.consumers} for g in other.groups
    }


class Reads(nn.Module):
    """One layer that reads other units in another call."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, left: bool = True) -> Tensor:
        return self.head((self.left(x) if left else self.right(x)).relu())


def test_a_layer_that_reads_other_units_in_another_call_is_refused():
    model = Reads()
    assert [g.name for g in gxd.find_units(model, X).groups] == ["left"]
    plan = gxd.find_units(model, [X, (X, False)])
    assert not plan.groups
    assert "another of the traced calls" in {s.name: s.reason for s in plan.skipped}["left"]


def test_an_empty_list_of_calls_is_an_error():
    with pytest.raises(ValueError, match="empty list"):
        gxd.find_units(Heads(), [])


def test_one_call_that_cannot_be_traced_is_the_error_of_all():
    with pytest.raises(gxd.TraceError, match="Heads"):
        gxd.find_units(Heads(), [X, (X, 7)])


def test_a_model_that_is_not_made_yet_has_the_plan_of_one_that_is():
    with torch.device("meta"):
        model = Heads()
    for inputs in (X, X.to("meta")):
        assert gxd.find_units(model, inputs).fingerprint() == gxd.find_units(Heads(), X).fingerprint()


@pytest.mark.filterwarnings("ignore")
def test_quantised_models_are_refused_with_what_to_do():
    model = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    with pytest.raises(gxd.TraceError, match=r"'0' is quantised .* floating-point model"):
        gxd.find_units(model, X)


@pytest.mark.filterwarnings("ignore")
def test_flattened_parameters_of_the_first_fsdp_are_refused_with_what_to_do():
    from torch.distributed.fsdp import FullyShardedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 3)), device_id=torch.device("cpu"))
        with pytest.raises(gxd.TraceError, match=r"before you wrap the model, or shard it with .*fully_shard"):
            gxd.find_units(model, X)
    finally:
        dist.destroy_process_group()


def test_the_plan_does_not_depend_on_the_batch_that_is_given():
    prints = {
        gxd.find_units(Heads(), X.repeat(times, 1)[:size]).fingerprint() for times, size in [(1, 1), (1, 6), (9, 50)]
    }
    assert len(prints) == 1


LENGTH = 5
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
NO_PADDING = torch.zeros(2, LENGTH, dtype=torch.bool)
SEQUENCES = torch.randn(2, LENGTH, 8, generator=torch.Generator().manual_seed(0))
BOTH = {"src": SEQUENCES, "tgt": SEQUENCES}


class Sequences(nn.Module):
    """One of torch's own Transformers between two layers."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "batch_first": True, **options}
        self.embed, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        nested = {name: sizes.pop(name) for name in ("enable_nested_tensor",) if name in sizes}
        if kind == "both":
            self.body: nn.Module = nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **sizes)
        elif kind == "encoder":
            self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2, **nested)
        else:
            self.body = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 2)

    def forward(self, **inputs: Any) -> Tensor:
        return self.head(self.body(**{name: self.embed(x) if x.dim() == 3 else x for name, x in inputs.items()}))


class MakesItsMask(Sequences):
    """As the language model in torch's tutorial does, which keeps it."""

    mask: Any = None

    def forward(self, **inputs: Any) -> Tensor:
        if self.mask is None or len(self.mask) != len(inputs["src"]):
            self.mask = torch.log(torch.tril(torch.ones(len(inputs["src"]), len(inputs["src"]))))
        return super().forward(**inputs, mask=self.mask)


TORCHS_OWN: dict[str, Any] = {
    "encoder": (lambda: Sequences("encoder"), {"src": SEQUENCES, "mask": CAUSAL}),
    "encoder with a mask of booleans": (lambda: Sequences("encoder"), {"src": SEQUENCES, "mask": CAUSAL < 0}),
    "encoder without nested tensors": (
        lambda: Sequences("encoder", enable_nested_tensor=False),
        {"src": SEQUENCES, "mask": CAUSAL < 0, "src_key_padding_mask": NO_PADDING},
    ),
    "decoder": (lambda: Sequences("decoder"), {"tgt": SEQUENCES, "memory": SEQUENCES, "tgt_mask": CAUSAL}),
    "decoder with padding": (
        lambda: Sequences("decoder"),
        {
            "tgt": SEQUENCES,
            "memory": SEQUENCES,
            "tgt_mask": CAUSAL,
            "memory_mask": CAUSAL,
            "tgt_key_padding_mask": NO_PADDING,
        },
    ),
    "both": (lambda: Sequences("both"), {**BOTH, "tgt_mask": CAUSAL}),
    "both with all masks": (lambda: Sequences("both"), {**BOTH, "src_mask": CAUSAL, "tgt_mask": CAUSAL}),
    "time first": (lambda: MakesItsMask("encoder", batch_first=False), {"src": SEQUENCES.transpose(0, 1)}),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", TORCHS_OWN)
def test_torchs_own_transformers_are_traced_with_the_masks_of_its_examples(name: str, training: bool):
    make, inputs = TORCHS_OWN[name]
    model = make().train(training)
    looks = nn.modules.transformer._detect_is_causal_mask
    plan = gxd.find_units(model, inputs, batch_dim=1 if name == "time first" else 0)
    assert sum("linear1" in group.name for group in plan.groups) == 2
    assert gxd.verify_plan(model, inputs, plan=plan)
    assert nn.modules.transformer._detect_is_causal_mask is looks and looks(CAUSAL) is True
    assert model.training is training
