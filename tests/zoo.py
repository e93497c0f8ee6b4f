"""Small models, each with the plan that a careful human derives by hand.

A case is a function that builds a model; its decorator states the example inputs, every expected group
(`unit(size, producers, consumers, norms)`), and some of the expected skips. Groups are keyed by the first
producer in execution order, with the rows in brackets where the group holds only a part of them. Registration
order is the order of the keywords of `Net`. The cases were derived without looking at the library.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm


@dataclass(frozen=True)
class Expect:
    size: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    norms: tuple[str, ...] = ()
    exact: bool = True
    """False: the compensated reset only approximates the clamp (zero padding or a transposed convolution in a
    consumer, a norm that couples units, a consumer without a place for the compensation)."""


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    """A tensor, a tuple of positional arguments, or a dict of keyword arguments; two examples."""
    groups: dict[str, Expect]
    """The full set of groups with default options."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Name -> a regular expression that the lower-case reason contains. Not exhaustive."""
    residual_groups: dict[str, Expect] | None = None
    """The full set of groups with residual="group"; None: not tested."""
    batch_dim: int = 0


CASES: list[Case] = []
ANY = r"\w"  # skipped, whatever the words of the reason
TIED = r"tied|shared"
TWICE = r"twice|times"
SCORE = r"attention|score"
LEAVES = r"output|read by"


def unit(size: int, producers: str, consumers: str, norms: str = "", exact: bool = True) -> Expect:
    return Expect(size, tuple(producers.split()), tuple(consumers.split()), tuple(norms.split()), exact)


def case(
    inputs: Callable[[], Any],
    groups: dict[str, Expect],
    skipped: dict[str, str] | None = None,
    extra: dict[str, Expect] | None = None,
    batch_dim: int = 0,
):
    """`extra`: what residual="group" adds to the default groups ({}: nothing; None: not tested)."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        both = None if extra is None else {**groups, **extra}
        CASES.append(Case(build.__name__, build, inputs, groups, skipped or {}, both, batch_dim))
        return build

    return register


class Net(nn.Module):
    """Modules and parameters by keyword, registered in that order; `run(net, *inputs)` is the forward."""

    def __init__(self, run: Callable[..., Any], **parts: nn.Module | nn.Parameter):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def x(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def xs(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randn(*shape) for shape in shapes)


def tokens(vocabulary: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(vocabulary, shape)


def chain(**parts: nn.Module) -> nn.Sequential:
    """A Sequential with names."""
    net = nn.Sequential()
    for name, part in parts.items():
        net.add_module(name, part)
    return net


def freeze(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


linear = nn.Linear
param = nn.Parameter


# ---------------------------------------------------------------- chains of linear layers

MLP = {"fc1": unit(7, "fc1", "fc2"), "fc2": unit(9, "fc2", "fc3")}
HIDDEN = {"fc1": unit(7, "fc1", "fc2")}  # one hidden layer of seven units
OUT2, OUT3 = {"fc2": "output"}, {"fc3": "output"}


@case(x(2, 5), MLP, OUT3, extra={})
def mlp():
    return chain(fc1=linear(5, 7), act1=nn.ReLU(), fc2=linear(7, 9), act2=nn.Tanh(), fc3=linear(9, 3))


@case(x(2, 5), MLP, OUT3)
def mlp_registered_in_scrambled_order():
    def run(m, x):
        return m.fc3(m.act(m.fc2(m.act(m.fc1(x)))))

    return Net(run, fc3=linear(9, 3), fc1=linear(5, 7), act=nn.GELU(), fc2=linear(7, 9))


@case(x(2, 5), {"0.0": unit(7, "0.0", "1.0"), "1.0": unit(9, "1.0", "2")}, {"2": "output"})
def mlp_nested_sequential():
    return nn.Sequential(
        nn.Sequential(linear(5, 7), nn.SiLU()),
        nn.Sequential(linear(7, 9), nn.Identity(), nn.ELU()),
        linear(9, 3),
    )


@case(x(2, 5), {"layers.2": unit(7, "layers.2", "layers.0"), "layers.0": unit(9, "layers.0", "layers.1")})
def module_list_walked_out_of_order():
    def run(m, x):
        return m.layers[1](F.relu(m.layers[0](F.relu(m.layers[2](x)))))

    return Net(run, layers=nn.ModuleList([linear(7, 9), linear(9, 3), linear(5, 7)]))


@case(x(2, 5), {}, {"fc": "output"}, extra={})
def single_linear():
    return chain(fc=linear(5, 3))


@case(x(2, 5), HIDDEN, {"fc2": LEAVES})
def log_softmax_at_the_end():
    return Net(lambda m, x: F.log_softmax(m.fc2(F.relu(m.fc1(x))), -1), fc1=linear(5, 7), fc2=linear(7, 3))


@case(x(2, 5), HIDDEN, OUT2)
def layer_that_is_never_called():
    return Net(lambda m, x: m.fc2(m.fc1(x).relu()), spare=linear(7, 9), fc1=linear(5, 7), fc2=linear(7, 3))


@case(x(2, 5), HIDDEN, OUT2)
def input_norm_belongs_to_no_unit():
    return chain(bn=nn.BatchNorm1d(5), fc1=linear(5, 7), act=nn.ReLU(), fc2=linear(7, 3))


@case(x(2, 5), {"fc1": unit(7, "fc1", "fc2", exact=False), "fc2": unit(9, "fc2", "fc3")}, OUT3)
def consumer_without_bias():
    return chain(fc1=linear(5, 7), act1=nn.ReLU(), fc2=linear(7, 9, bias=False), act2=nn.ReLU(), fc3=linear(9, 3))


# activations: module, functional, in place, reused, by hand


@case(x(2, 5), MLP, OUT3)
def one_inplace_activation_reused():
    def run(m, x):
        return m.fc3(m.act(m.fc2(m.act(m.fc1(x)))))

    return Net(run, act=nn.ReLU(inplace=True), fc1=linear(5, 7), fc2=linear(7, 9), fc3=linear(9, 3))


@case(x(2, 5), MLP, OUT3)
def functional_inplace_activations():
    def run(m, x):
        h = m.fc1(x)
        F.relu_(h)
        h.mul_(0.5)
        return m.fc3(m.fc2(h).tanh_())

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 9), fc3=linear(9, 3))


@case(x(2, 5), MLP, OUT3)
def prelu():
    return chain(fc1=linear(5, 7), act1=nn.PReLU(7), fc2=linear(7, 9), act2=nn.PReLU(), fc3=linear(9, 3))


@case(x(2, 5), MLP, OUT3)
def leaky_relu_by_hand():
    def run(m, x):
        h = m.fc1(x)
        h = m.fc2(torch.where(h > 0, h, 0.1 * h))
        return m.fc3(h.clamp(min=0) + 0.01 * h.clamp(max=0))  # both summands are the same unit: no merge

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 9), fc3=linear(9, 3))


@case(x(2, 5), MLP, OUT3)
def swish_and_step_by_hand():
    def run(m, x):
        h = m.fc1(x)
        h = m.fc2(h * torch.sigmoid(1.7 * h))
        return m.fc3(h * (h > 0).float())

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 9), fc3=linear(9, 3))


@case(x(2, 5), HIDDEN, OUT2)
def concatenated_relu_has_two_columns_per_unit():
    def run(m, x):
        h = m.fc1(x)
        return m.fc2(torch.cat([F.relu(h), F.relu(-h)], -1))

    return Net(run, fc1=linear(5, 7), fc2=linear(14, 3))


@case(x(2, 5), {**MLP, "fc3": unit(4, "fc3", "fc4")}, {"fc4": "output"})
def dropout_and_alpha_dropout():
    def run(m, x):
        h = m.alpha(F.selu(m.fc2(m.drop(F.relu(m.fc1(x))))))
        return m.fc4(F.dropout(m.fc3(h), 0.2, m.training))

    parts = {"fc1": linear(5, 7), "fc2": linear(7, 9), "fc3": linear(9, 4), "fc4": linear(4, 3)}
    return Net(run, drop=nn.Dropout(0.3), alpha=nn.AlphaDropout(0.2), **parts)


@case(x(2, 5), MLP, OUT3)
def scalars_and_learned_scales():
    def run(m, x):
        h = F.relu(m.fc1(x) * 0.5) / 3.0 - 0.1
        return m.fc3(1.0 - m.gain * torch.tanh(m.scale * m.fc2(h)))

    layers = {"fc1": linear(5, 7), "fc2": linear(7, 9), "fc3": linear(9, 3)}
    return Net(run, gain=param(torch.ones(())), scale=param(torch.full((9,), 0.5)), **layers)


@case(lambda: (torch.randn(2, 5), torch.tensor([[1.0, 0, 1, 1, 0, 1, 0], [0, 1, 1, 0, 1, 0, 1]])), HIDDEN, OUT2)
def mask_by_multiplication_with_an_input():
    def run(m, x, mask):
        return m.fc2(F.relu(m.fc1(x)) * mask)

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 3))


@case(xs((2, 4, 5), (2, 4)), HIDDEN, OUT2)
def masked_fill_by_an_input():
    def run(m, x, mask):
        h = F.relu(m.fc1(x)).masked_fill(mask.unsqueeze(-1) > 0, 0.0)
        return m.fc2(h.sum(1))

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 3))


# norms on the path


@case(
    x(2, 5),
    {"fc1": unit(7, "fc1", "fc2", "ln1", exact=False), "fc2": unit(9, "fc2", "fc3", "ln2", exact=False)},
    OUT3,
)
def layernorm_before_activation():
    def run(m, x):
        return m.fc3(F.relu(m.ln2(m.fc2(F.relu(m.ln1(m.fc1(x)))))))

    layers = {"fc1": linear(5, 7), "fc2": linear(7, 9), "fc3": linear(9, 3)}
    return Net(run, ln1=nn.LayerNorm(7), ln2=nn.LayerNorm(9), **layers)


@case(x(2, 5), {"fc1": unit(7, "fc1", "fc2", "rms", exact=False)}, OUT2)
def rmsnorm_after_activation():
    return chain(fc1=linear(5, 7), act=nn.ReLU(), rms=nn.RMSNorm(7), fc2=linear(7, 3))


@case(x(2, 5), {"fc1": unit(7, "fc1", "fc2", "bn1"), "fc2": unit(9, "fc2", "fc3", "bn2")}, OUT3)
def batchnorm_mlp_without_biases():
    """fc2 has no bias, but the BatchNorm after it gives compensation a place. BatchNorm couples no units."""
    parts = {"fc1": linear(5, 7, bias=False), "bn1": nn.BatchNorm1d(7), "act1": nn.ReLU()}
    parts |= {
        "fc2": linear(7, 9, bias=False),
        "bn2": nn.BatchNorm1d(9),
        "act2": nn.ReLU(),
        "fc3": linear(9, 3),
    }
    return chain(**parts)


# ---------------------------------------------------------------- several readers, merges, splits


@case(x(2, 5), {"trunk": unit(7, "trunk", "a b")}, {"a": "output", "b": "output"})
def parallel_heads_as_a_tuple():
    def run(m, x):
        h = F.relu(m.trunk(x))
        return m.a(h), m.b(h)

    return Net(run, a=linear(7, 3), b=linear(7, 2), trunk=linear(5, 7))


@case(x(2, 5), {"trunk": unit(7, "trunk", "policy value")}, {"policy": "output", "value": "output"})
def parallel_heads_as_a_dict_with_two_views():
    def run(m, x):
        h = m.trunk(x)
        return {"logits": m.policy(F.relu(h)), "value": m.value(torch.tanh(h)).squeeze(-1)}

    return Net(run, trunk=linear(5, 7), policy=linear(7, 3), value=linear(7, 1))


class ReturnsLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = linear(5, 7), linear(7, 3)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Tensor | None]:
        logits = self.fc2(F.relu(self.fc1(features)))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits}


@case(lambda: {"features": torch.randn(2, 5), "labels": torch.tensor([0, 2])}, HIDDEN, OUT2)
def keyword_inputs_and_a_loss_inside():
    return ReturnsLoss()


@case(
    x(2, 5),
    {"trunk": unit(7, "trunk", "fv fa"), "fv": unit(4, "fv", "v"), "fa": unit(6, "fa", "a")},
    {"v": ANY, "a": ANY},
    extra={},
)
def dueling_heads():
    def run(m, x):
        h = F.relu(m.trunk(x))
        advantage = m.a(F.relu(m.fa(h)))
        return m.v(F.relu(m.fv(h))) + advantage - advantage.mean(-1, keepdim=True)

    return Net(run, trunk=linear(5, 7), fv=linear(7, 4), v=linear(4, 1), fa=linear(7, 6), a=linear(6, 3))


@case(x(2, 5), {"fc1": unit(7, "fc1", "fc2 probe")}, {"fc2": "output", "probe": "output"})
def detached_probe_is_a_consumer():
    def run(m, x):
        h = F.relu(m.fc1(x))
        return m.fc2(h), m.probe(h.detach())

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 3), probe=linear(7, 2))


@case(x(2, 5), {"fc1": unit(7, "fc1", "fc2 fc3")}, {"fc2": LEAVES, "fc3": "output"})
def output_that_another_layer_reads():
    def run(m, x):
        h = F.relu(m.fc1(x))
        first = m.fc2(h)
        return first, m.fc3(torch.cat([h, first], -1))

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 4), fc3=linear(11, 3))


@case(x(2, 5), {"a": unit(4, "a", "fc"), "b": unit(6, "b", "fc")}, {"fc": "output"}, extra={})
def concat_of_two_branches():
    def run(m, x):
        return m.fc(torch.cat([F.relu(m.a(x)), torch.tanh(m.b(x))], dim=-1))

    return Net(run, fc=linear(10, 3), b=linear(5, 6), a=linear(5, 4))


@case(x(2, 5), {"fc1": unit(7, "fc1", "fc2"), "fc2": unit(9, "fc2", "fc3")}, OUT3)
def raw_input_concatenated_again():
    def run(m, x):
        h = F.relu(m.fc1(x))
        return m.fc3(F.relu(m.fc2(torch.cat([x, h], -1))))

    return Net(run, fc1=linear(5, 7), fc2=linear(12, 9), fc3=linear(9, 3))


@case(
    x(2, 5),
    {"fc1[0:4]": unit(4, "fc1", "a"), "fc1[4:10]": unit(6, "fc1", "b")},
    {"a": "output", "b": "output"},
)
def split_to_two_consumers():
    def run(m, x):
        left, right = F.relu(m.fc1(x)).split([4, 6], dim=-1)
        return m.a(left), m.b(right)

    return Net(run, fc1=linear(5, 10), a=linear(4, 3), b=linear(6, 2))


@case(x(2, 5), {"fc1": unit(8, "fc1", "fc2")}, OUT2)
def chunks_swapped_for_one_consumer():
    def run(m, x):
        left, right = m.fc1(x).chunk(2, dim=-1)
        return m.fc2(torch.cat([torch.tanh(right), F.relu(left)], -1))

    return Net(run, fc1=linear(5, 8), fc2=linear(8, 3))


@case(
    x(2, 5),
    {"fc1[0:4]": unit(4, "fc1", "fc2 side"), "fc1[4:10]": unit(6, "fc1", "fc2")},
    {"fc2": "output", "side": "output"},
)
def second_consumer_of_a_slice():
    def run(m, x):
        h = F.relu(m.fc1(x))
        return m.fc2(h), m.side(h[:, :4])

    return Net(run, fc1=linear(5, 10), fc2=linear(10, 3), side=linear(4, 2))


@case(x(2, 5), {"fc1": unit(6, "fc1", "fc2")}, OUT2)
def slice_returned_slice_consumed():
    def run(m, x):
        h = m.fc1(x)
        return h[:, :4], m.fc2(F.relu(h[:, 4:]))

    return Net(run, fc1=linear(5, 10), fc2=linear(6, 3))


# products: gates merge the units at the same position


@case(x(2, 5), {"gate": unit(9, "gate up", "down")}, {"down": "output"}, extra={})
def swiglu():
    def run(m, x):
        return m.down(F.silu(m.gate(x)) * m.up(x))

    return Net(run, up=linear(5, 9), down=linear(9, 3), gate=linear(5, 9))


@case(x(2, 5), {"fc1": unit(6, "fc1", "fc2")}, OUT2)
def glu_functional():
    return Net(lambda m, x: m.fc2(F.glu(m.fc1(x))), fc1=linear(5, 12), fc2=linear(6, 3))


@case(x(2, 5), {"fc1": unit(6, "fc1", "fc2")}, OUT2)
def glu_by_chunk_and_product():
    def run(m, x):
        value, gate = m.fc1(x).chunk(2, dim=-1)
        return m.fc2(value * F.gelu(gate))

    return Net(run, fc1=linear(5, 12), fc2=linear(6, 3))


@case(x(2, 3, 6, 6), {"conv1": unit(4, "conv1", "conv2"), "conv2": unit(5, "conv2", "fc")}, {"fc": "output"})
def glu_over_channels():
    def run(m, x):
        return m.fc(m.conv2(F.glu(m.conv1(x), dim=1)).mean((2, 3)))

    return Net(run, conv1=nn.Conv2d(3, 8, 3), conv2=nn.Conv2d(4, 5, 3), fc=linear(5, 3))


@case(x(2, 5), {"a": unit(7, "a b", "fc")}, {"fc": "output"})
def maxout_of_two_layers():
    return Net(lambda m, x: m.fc(torch.maximum(m.a(x), m.b(x))), a=linear(5, 7), b=linear(5, 7), fc=linear(7, 3))


@case(x(2, 5), {"fc2": unit(6, "fc2", "fc3")}, {"fc1": ANY, "fc3": "output"}, extra={})
def maxout_over_pieces():
    """A maximum over the unit axis mixes units: three rows share one column."""

    def run(m, x):
        return m.fc3(F.relu(m.fc2(m.fc1(x).unflatten(-1, (4, 3)).amax(-1))))

    return Net(run, fc1=linear(5, 12), fc2=linear(4, 6), fc3=linear(6, 3))


@case(
    x(2, 3, 7, 7),
    {
        "conv1": unit(8, "conv1 expand", "squeeze conv2"),
        "squeeze": unit(4, "squeeze", "expand"),
        "conv2": unit(5, "conv2", "fc"),
    },
    {"fc": "output"},
)
def squeeze_and_excitation():
    def run(m, x):
        h = F.relu(m.conv1(x))
        scale = torch.sigmoid(m.expand(F.relu(m.squeeze(h.mean((2, 3))))))
        return m.fc(F.relu(m.conv2(h * scale[:, :, None, None])).mean((2, 3)))

    parts = {"squeeze": linear(8, 4), "expand": linear(4, 8), "fc": linear(5, 3)}
    return Net(run, conv1=nn.Conv2d(3, 8, 3), conv2=nn.Conv2d(8, 5, 3), **parts)


@case(x(2, 3, 7, 7), {"conv1": unit(6, "conv1", "gate conv2")}, {"gate": ANY, "conv2": "output"})
def spatial_gate_is_no_unit_of_its_own():
    """One gate scales all channels. It has no column of its own, so it is skipped; the channels are not."""

    def run(m, x):
        h = F.relu(m.conv1(x))
        return m.conv2(h * torch.sigmoid(m.gate(h))).mean((2, 3))

    return Net(run, conv1=nn.Conv2d(3, 6, 3), gate=nn.Conv2d(6, 1, 1), conv2=nn.Conv2d(6, 3, 3))


# sums: residual coordinates


@case(x(2, 5), {}, {"a": "residual", "fc": "output"}, extra={"a": unit(7, "a b", "fc")})
def sum_of_two_branches():
    return Net(lambda m, x: m.fc(F.relu(m.a(x) + m.b(x))), b=linear(5, 7), a=linear(5, 7), fc=linear(7, 3))


@case(
    x(2, 5),
    {"fc1": unit(8, "fc1", "fc2")},
    {"stem": "residual", "head": "output"},
    extra={"stem": unit(6, "stem fc2", "fc1 head")},
)
def residual_mlp():
    def run(m, x):
        h = m.stem(x)
        return m.head(h + m.fc2(F.relu(m.fc1(h))))

    return Net(run, stem=linear(5, 6), fc1=linear(6, 8), fc2=linear(8, 6), head=linear(6, 3))


@case(x(2, 5), {"fc1": unit(8, "fc1", "fc2")}, {"fc2": "added", "head": "output"}, extra={})
def residual_add_to_the_raw_input():
    def run(m, x):
        return m.head(F.relu(x + m.fc2(F.relu(m.fc1(x)))))

    return Net(run, fc1=linear(5, 8), fc2=linear(8, 5), head=linear(5, 3))


@case(
    xs((2, 5), (2, 4)),
    {},
    {"fc1": "residual", "fc2": "output"},
    extra={"fc1": unit(6, "fc1 film", "fc2")},
)
def film():
    """The gate merges fc1[i] and film[i]; the shift film[6 + i] makes it a residual coordinate."""

    def run(m, x, context):
        h = m.fc1(x)
        scale, shift = m.film(context).chunk(2, dim=-1)
        return m.fc2(F.relu(h * (1 + scale) + shift))

    return Net(run, fc1=linear(5, 6), film=linear(4, 12), fc2=linear(6, 3))


@case(
    xs((2, 3, 7, 7), (2, 4)),
    {"time1": unit(5, "time1", "time2"), "conv2": unit(7, "conv2", "fc")},
    {"conv1": "residual", "fc": "output"},
    extra={"conv1": unit(6, "conv1 time2", "conv2")},
)
def time_embedding_added_to_features():
    def run(m, x, t):
        h = m.conv1(x)
        h = h + m.time2(F.silu(m.time1(t)))[:, :, None, None]
        return m.fc(F.relu(m.conv2(F.silu(h))).mean((2, 3)))

    time = {"time1": linear(4, 5), "time2": linear(5, 6)}
    return Net(run, conv1=nn.Conv2d(3, 6, 3), conv2=nn.Conv2d(6, 7, 3), fc=linear(7, 3), **time)


@case(
    x(2, 5),
    {},
    {"stem": "residual", "head": "output"},
    extra={"stem": unit(6, "stem value gate", "value gate head")},
)
def highway():
    """The carry adds the stem's coordinate to the value's, whatever the gate multiplies."""

    def run(m, x):
        h = m.stem(x)
        value, gate = F.relu(m.value(h)), torch.sigmoid(m.gate(h))
        return m.head(gate * value + (1 - gate) * h)

    return Net(run, stem=linear(5, 6), value=linear(6, 6), gate=linear(6, 6), head=linear(6, 3))


# ---------------------------------------------------------------- layers that must be left alone


@case(tokens(11, 2, 4), {"fc1": unit(7, "fc1", "fc2")}, {"embed": "embedding", "fc2": "output"})
def plain_embedding():
    def run(m, ids):
        return m.fc2(F.relu(m.fc1(m.embed(ids).flatten(1))))

    return Net(run, embed=nn.Embedding(11, 6), fc1=linear(24, 7), fc2=linear(7, 3))


@case(
    tokens(11, 2, 4),
    {"fc1": unit(9, "fc1", "fc2")},
    {"embed": f"embedding|{TIED}", "fc2": TIED, "head": f"output|{TIED}"},
    extra={},
)
def language_model_with_tied_head():
    def run(m, ids):
        return m.head(m.fc2(F.relu(m.fc1(m.embed(ids)))))

    net = Net(run, embed=nn.Embedding(11, 6), fc1=linear(6, 9), fc2=linear(9, 6), head=linear(6, 11, bias=False))
    net.head.weight = net.embed.weight
    return net


@case(
    x(2, 5),
    {"fc4": unit(7, "fc4", "fc5")},
    {"fc1": TIED, "fc2": TIED, "fc3": TIED, "fc5": "output"},
)
def two_layers_with_one_weight():
    """fc1 is read by a tied weight; fc2 and fc3 share theirs."""
    parts = {
        "fc1": linear(5, 6),
        "act1": nn.Tanh(),
        "fc2": linear(6, 6),
        "act2": nn.Tanh(),
        "fc3": linear(6, 6),
    }
    net = chain(**parts, act3=nn.Tanh(), fc4=linear(6, 7), act4=nn.Tanh(), fc5=linear(7, 3))
    net.fc3.weight = net.fc2.weight
    return net


@case(x(2, 5), {"fc3": unit(9, "fc3", "fc4")}, {"fc1": ANY, "fc2": TWICE, "fc4": "output"}, extra={})
def module_called_twice_in_a_row():
    """A column of fc2 belongs to fc1's unit in one call and to fc2's own in the other."""

    def run(m, x):
        h = F.relu(m.fc1(x))
        return m.fc4(F.relu(m.fc3(F.relu(m.fc2(F.relu(m.fc2(h)))))))

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 7), fc3=linear(7, 9), fc4=linear(9, 3))


@case(xs((2, 5), (2, 5)), {"fc2": unit(9, "fc2", "fc3")}, {"fc1": TWICE, "fc3": "output"})
def siamese():
    def run(m, left, right):
        h = torch.cat([F.relu(m.fc1(left)), F.relu(m.fc1(right))], -1)
        return m.fc3(F.relu(m.fc2(h)))

    return Net(run, fc1=linear(5, 7), fc2=linear(14, 9), fc3=linear(9, 3))


@case(
    x(2, 5, 4),
    {"proj": unit(6, "proj", "rnn"), "fc1": unit(9, "fc1", "fc2")},
    {"rnn": "recurrent", "fc2": "output"},
)
def lstm():
    """Its own units feed back; those it reads are in its input weights alone."""

    def run(m, x):
        h, _ = m.rnn(F.relu(m.proj(x)))
        return m.fc2(F.relu(m.fc1(h[:, -1])))

    return Net(run, proj=linear(4, 6), rnn=nn.LSTM(6, 7, batch_first=True), fc1=linear(7, 9), fc2=linear(9, 3))


@case(x(5, 2, 4), {}, {"rnn": "recurrent", "head": "output"}, batch_dim=1)
def gru_tokens_first():
    return Net(lambda m, x: m.head(m.rnn(x)[1][-1]), rnn=nn.GRU(4, 6, num_layers=2), head=linear(6, 3))


@case(x(2, 5), {"fc2": unit(9, "fc2", "fc3")}, {"fc1": "frozen", "fc3": "output"})
def frozen_producer():
    fc1 = freeze(linear(5, 7))
    return chain(fc1=fc1, act1=nn.ReLU(), fc2=linear(7, 9), act2=nn.ReLU(), fc3=linear(9, 3))


@case(x(2, 5), HIDDEN, {"fc2": "frozen", "fc3": "frozen", "fc4": "output"})
def frozen_consumer():
    """fc2's units end in a frozen layer; fc3's start in it."""
    parts = {"fc1": linear(5, 7), "act1": nn.ReLU(), "fc2": linear(7, 9), "act2": nn.ReLU()}
    return chain(**parts, fc3=freeze(linear(9, 4)), act3=nn.ReLU(), fc4=linear(4, 3))


@case(x(2, 5), {}, {"fc1": "frozen"})
def one_of_two_consumers_frozen():
    def run(m, x):
        h = F.relu(m.fc1(x))
        return m.a(h), m.b(h)

    return Net(run, fc1=linear(5, 7), a=linear(7, 3), b=freeze(linear(7, 2)))


@case(x(2, 5), {}, {"fc1": "frozen", "fc2": "frozen"}, extra={})
def everything_frozen_but_one():
    parts = {"fc1": freeze(linear(5, 7)), "act1": nn.ReLU(), "fc2": linear(7, 9), "act2": nn.ReLU()}
    return chain(**parts, fc3=freeze(linear(9, 3)))


@case(
    x(2, 5),
    {"fc3": unit(4, "fc3", "fc4")},
    {"fc1": "functional", "fc2": "functional", "fc4": "output"},
)
def weight_used_functionally():
    def run(m, x):
        h = F.relu(F.linear(F.relu(m.fc1(x)), m.fc2.weight, m.fc2.bias))
        return m.fc4(F.relu(m.fc3(h)))

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 9), fc3=linear(9, 4), fc4=linear(4, 3))


@case(x(2, 5), {"fc2": unit(6, "fc2", "fc3")}, {"fc1": r"read by|functional", "fc3": "output"})
def bare_parameter_as_a_matrix():
    def run(m, x):
        return m.fc3(F.relu(m.fc2(F.relu(m.fc1(x)) @ m.matrix)))

    layers = {"fc1": linear(5, 7), "fc2": linear(4, 6), "fc3": linear(6, 3)}
    return Net(run, matrix=param(0.3 * torch.ones(7, 4)), **layers)


@case(
    x(2, 5),
    {"fc3": unit(4, "fc3", "fc4")},
    {"fc1": "computed", "fc2": "computed", "fc4": "output"},
)
def weight_norm_parametrization():
    parts = {"fc1": linear(5, 7), "act1": nn.ReLU(), "fc2": weight_norm(linear(7, 9)), "act2": nn.ReLU()}
    return chain(**parts, fc3=linear(9, 4), act3=nn.ReLU(), fc4=linear(4, 3))


@case(x(2, 5), {"fc2": unit(9, "fc2", "fc3")}, {"fc1": LEAVES, "fc3": "output"})
def norm_of_a_hidden_layer_returned():
    def run(m, x):
        h = F.relu(m.fc1(x))
        return m.fc3(F.relu(m.fc2(h))), h.norm(dim=-1)

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 9), fc3=linear(9, 3))


@case(x(2, 5), HIDDEN, {"fc2": LEAVES, "fc3": "output"}, extra={})
def hidden_state_returned():
    def run(m, x):
        h = F.relu(m.fc2(F.relu(m.fc1(x))))
        return m.fc3(h), h

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 9), fc3=linear(9, 3))


@case(
    xs((2, 5), (2, 4)),
    {"a1": unit(7, "a1", "a2"), "b1": unit(9, "b1", "b2")},
    {"a2": LEAVES, "b2": LEAVES},
)
def two_towers_and_cosine_similarity():
    def run(m, left, right):
        return F.cosine_similarity(m.a2(F.relu(m.a1(left))), m.b2(F.relu(m.b1(right))), dim=-1)

    return Net(run, a1=linear(5, 7), a2=linear(7, 6), b1=linear(4, 9), b2=linear(9, 6))


@case(xs((2, 5), (2, 5)), {"fc2": unit(6, "fc2", "fc3")}, {"fc1": ANY, "fc3": "output"})
def bilinear_layer():
    def run(m, left, right):
        return m.fc3(F.relu(m.fc2(m.pair(F.relu(m.fc1(left)), right))))

    parts = {"fc1": linear(5, 7), "pair": nn.Bilinear(7, 5, 4), "fc2": linear(4, 6)}
    return Net(run, **parts, fc3=linear(6, 3))


@case(x(2, 5), {"fc2": unit(9, "fc2", "fc3")}, {"fc1": ANY, "fc3": "output"}, extra={})
def softmax_over_units():
    return Net(
        lambda m, x: m.fc3(F.relu(m.fc2(F.softmax(m.fc1(x), -1)))),
        fc1=linear(5, 7),
        fc2=linear(7, 9),
        fc3=linear(9, 3),
    )


@case(x(2, 5), {"fc1": Expect(7, ("fc1",), ("fc2",), ("",), exact=False), "fc2": unit(9, "fc2", "fc3")}, OUT3)
def unit_vectors():
    """A norm without a module of its own: it couples the units."""

    def run(m, x):
        return m.fc3(F.relu(m.fc2(F.normalize(m.fc1(x), dim=-1))))

    return Net(run, fc1=linear(5, 7), fc2=linear(7, 9), fc3=linear(9, 3))


# ---------------------------------------------------------------- the other families register themselves

from tests import zoo_sequence, zoo_vision  # noqa: E402, F401
