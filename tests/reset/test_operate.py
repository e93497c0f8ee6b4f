"""The two primitives used alone, as a trainer of sparse autoencoders would."""

import pytest
import torch
from torch import nn

import gxd


class SparseAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 20), nn.Linear(20, 6)

    def forward(self, x):
        return self.decoder(torch.relu(self.encoder(x)))


def trained(optimizer=torch.optim.Adam, **options):
    torch.manual_seed(0)
    model = SparseAutoencoder()
    opt = optimizer(model.parameters(), lr=0.01, **options)
    for _ in range(3):
        x = torch.randn(16, 6)
        (model(x) - x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return model, opt, gxd.find_units(model, torch.randn(2, 6))


def test_dead_features_are_reset_with_their_optimizer_state():
    model, opt, plan = trained()
    dead = torch.zeros(20, dtype=torch.bool)
    dead[[2, 5]] = True
    kept = model.encoder.weight[~dead].clone()
    gxd.reset_units(model, plan, {"encoder": dead}, optimizer=opt)
    assert torch.equal(model.encoder.weight[~dead], kept)
    assert torch.all(model.decoder.weight[:, dead] == 0)
    assert torch.all(model.encoder.bias[dead] == 0)
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.all(opt.state[model.encoder.weight][key][dead] == 0)
        assert torch.all(opt.state[model.encoder.bias][key][dead] == 0)
        assert torch.all(opt.state[model.decoder.weight][key][:, dead] == 0)
        assert torch.all(opt.state[model.decoder.weight][key][:, ~dead] != 0)
        assert torch.all(opt.state[model.decoder.bias][key] != 0)


def test_the_seed_of_the_generator_decides_the_fresh_weights_and_the_global_one_is_left_alone():
    results = []
    for _ in range(2):
        model, _, plan = trained()
        state = torch.get_rng_state()
        gxd.reset_units(model, plan, {"encoder": [3]}, generator=torch.Generator().manual_seed(4))
        assert torch.equal(torch.get_rng_state(), state)
        results.append(model.encoder.weight[3].clone())
    assert torch.equal(*results)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_optimizer_state_is_reset_along_any_axis(dim):
    model, opt, _ = trained()
    weight = model.encoder.weight
    before = opt.state[weight]["exp_avg"].clone()
    gxd.reset_optimizer_state(opt, weight, torch.tensor([1, 3]), dim)
    after = opt.state[weight]["exp_avg"].movedim(dim, 0)
    assert torch.all(after[[1, 3]] == 0)
    assert torch.equal(after[[0, 2]], before.movedim(dim, 0)[[0, 2]])


@pytest.mark.parametrize(("policy", "expected"), [("keep", 3.0), ("reset", 0.0)])
def test_the_step_of_adam_is_kept_or_reset_by_policy(policy, expected):
    model, opt, _ = trained()
    gxd.reset_optimizer_state(opt, model.encoder.weight, [1], 0, step_policy=policy)
    assert opt.state[model.encoder.weight]["step"].item() == expected
    assert opt.state[model.decoder.weight]["step"].item() == 3.0


class AdamWithCounts(torch.optim.Optimizer):
    """Each element, or each row, has a step count of its own, as in the authors' code of Continual Backpropagation."""

    def __init__(self, params, lr=0.01, dtype=torch.float32, rows=False):
        super().__init__(params, {"lr": lr, "dtype": dtype, "rows": rows})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    like = p[:, :1] if group["rows"] and p.dim() > 1 else p
                    state["step"] = torch.zeros_like(like, dtype=group["dtype"])
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad, 0.1)
                state["exp_avg_sq"].lerp_(p.grad.square(), 0.001)
                mean, square = state["exp_avg"] / (1 - 0.9 ** state["step"]), state["exp_avg_sq"]
                p.sub_(group["lr"] * mean / (square / (1 - 0.999 ** state["step"])).sqrt().add(1e-8))


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("policy", ["keep", "reset"])
def test_a_step_count_of_each_element_begins_anew_with_it(policy, dtype, rows):
    model, opt, plan = trained(AdamWithCounts, dtype=dtype, rows=rows)
    gxd.reset_units(model, plan, {"encoder": [2, 5]}, optimizer=opt, step_policy=policy)
    of_encoder, of_decoder = (opt.state[layer.weight]["step"] for layer in (model.encoder, model.decoder))
    assert of_encoder[:, 0].tolist() == [0 if row in (2, 5) else 3 for row in range(20)]
    assert opt.state[model.encoder.bias]["step"].tolist() == of_encoder[:, 0].tolist()
    columns = [3] * len(of_decoder[0]) if rows else of_encoder[:, 0].tolist()
    assert of_decoder[0].tolist() == columns, "what all columns share goes on"


def trained_by(kind, **options):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 3))
    optimizer = kind([weight], **options)
    for _ in range(3):
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weight, optimizer


def test_what_does_not_begin_with_zero_is_reset_to_what_it_begins_with():
    weight, rprop = trained_by(torch.optim.Rprop, lr=0.02)
    gxd.reset_optimizer_state(rprop, weight, [1], 0)
    assert rprop.state[weight]["step_size"][1].tolist() == pytest.approx([0.02] * 3)
    assert bool((rprop.state[weight]["step_size"][0] != 0.02).all())
    weight, nadam = trained_by(torch.optim.NAdam)
    gxd.reset_optimizer_state(nadam, weight, [1], 0, step_policy="reset")
    assert nadam.state[weight]["mu_product"].item() == 1.0


def test_an_average_of_weights_begins_anew_with_the_weights():
    weight, asgd = trained_by(torch.optim.ASGD, t0=0)
    before = asgd.state[weight]["ax"].clone()
    gxd.reset_optimizer_state(asgd, weight, [1], 0)
    assert torch.equal(asgd.state[weight]["ax"][1], weight[1])
    assert torch.equal(asgd.state[weight]["ax"][[0, 2, 3]], before[[0, 2, 3]])
    assert not torch.equal(before[1], weight[1])


def test_an_optimizer_without_state_yet_is_fine():
    model = SparseAutoencoder()
    opt = torch.optim.Adam(model.parameters())
    gxd.reset_optimizer_state(opt, model.encoder.weight, [0])
    gxd.reset_units(model, gxd.find_units(model, torch.randn(2, 6)), {"encoder": [0]}, optimizer=opt)
    assert not opt.state


def test_factored_moments_are_reset_where_they_have_a_slice():
    model, opt, plan = trained(torch.optim.Adafactor)
    weight = model.encoder.weight
    columns = opt.state[weight]["col_var"].clone()
    gxd.reset_units(model, plan, {"encoder": [4]}, optimizer=opt)
    assert torch.all(opt.state[weight]["row_var"][4] == 0)
    assert torch.all(opt.state[weight]["row_var"][:4] != 0)
    assert torch.equal(opt.state[weight]["col_var"], columns)


def test_a_strided_transposed_convolution_is_compensated_on_average():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 1), nn.Tanh(), nn.ConvTranspose2d(6, 3, 2, stride=2))
    plan = gxd.find_units(model, torch.randn(2, 2, 4, 4))
    x = torch.randn(8, 2, 5, 5)
    h = model[1](model[0](x)).detach()
    mean = h.mean((0, 2, 3))
    before = model(x).detach()
    gxd.reset_units(model, plan, {"0": [0, 1, 2]}, references={"0": mean})
    after = model(x).detach()
    torch.testing.assert_close(after.mean((0, 2, 3)), before.mean((0, 2, 3)), rtol=1e-4, atol=1e-5)


class TokensAcross(nn.Module):
    """A BatchNorm whose channels are the tokens, of which there are as many as outputs of the layer before it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 4, bias=False)
        self.across, self.third, self.head = nn.BatchNorm1d(4), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):  # (batch, 4 tokens, 3)
        h = torch.relu(self.across(self.second(torch.relu(self.first(x)))))
        return self.head(torch.relu(self.third(h)))


def test_a_batch_norm_over_tokens_does_not_take_the_mean_of_units_and_is_not_touched():
    torch.manual_seed(0)
    model = TokensAcross()
    x = torch.randn(8, 4, 3)
    plan = gxd.find_units(model, x[:2])
    assert plan["first"].consumers[0].running_mean is None and plan["first"].consumers[0].compensation == "none"
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    model(x).square().sum().backward()
    optimizer.step()
    kept = {name: value.clone() for name, value in model.across.state_dict().items()}
    units = {group.name: [0] for group in plan.groups}
    references = {group.name: torch.ones(group.size) for group in plan.groups}
    gxd.reset_units(model, plan, units, optimizer=optimizer, references=references, step_policy="reset")
    assert all(torch.equal(kept[name], value) for name, value in model.across.state_dict().items())
    assert float(optimizer.state[model.across.weight]["step"]) == 1.0
