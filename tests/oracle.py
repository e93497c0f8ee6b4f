"""Continual Backpropagation written a second time, slowly: loops, scalars, float64, as it is defined.

The library is compared with this file, so nothing here imports the library and nothing here is fast. What the
definitions say per example, per unit and per position is computed per example, per unit and per position.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

TARGET_LOGIT_UTILITIES = ("gxi", "gxd", "output_gradient")
LOSS_UTILITIES = ("loss_gradient", "taylor", "gxd_loss")
LOCAL_UTILITIES = ("activation", "contribution", "mc_contribution", "mc_adaptable_contribution")
UTILITIES = (*LOCAL_UTILITIES, *LOSS_UTILITIES, *TARGET_LOGIT_UTILITIES, "gxd_all_logit", "gxd_sketch", "gxd_kl")

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

Fresh = Callable[[int, int, int], Tensor]
"""(layer index, unit index, fan in) -> the new incoming weights of that unit, shape (fan_in,)."""


# ---- scores


@dataclass(frozen=True)
class View:
    """One group of units as one consumer sees it.

    h: (examples, positions, units).
    g: the gradient at h, of the same shape: of the loss, of the target logit, of v.z with a sign vector v per example,
       or of log p_y with a label y per example. For `gxd_all_logit` a sequence of them, over the classes. Local
       utilities need none.
    r: (units,), the reference of each unit in this view. Utilities without a reference need none.
    """

    h: Tensor
    g: Tensor | Sequence[Tensor] | None = None
    r: Sequence[float] | Tensor | None = None


def naive_scores(
    utility: str,
    views: Sequence[View],
    w_in: Sequence[Tensor] | None = None,
    w_out: Sequence[Sequence[Tensor]] | None = None,
    *,
    absolute_positions: bool = False,
) -> list[float]:
    """The instantaneous score of every unit of one group.

    w_in[unit]: all incoming weights of the unit, over all its producers, without bias (any shape).
    w_out[view][unit]: all outgoing weights of the unit in that view (any shape).
    absolute_positions: for gxi and the gxd family, take the absolute value at every position and view before
    summing, instead of after.
    """
    if utility not in UTILITIES:
        raise ValueError(f"unknown utility {utility!r}")
    units = views[0].h.shape[2]
    if utility in LOCAL_UTILITIES:
        return [_local_score(utility, views, w_in, w_out, unit) for unit in range(units)]
    if utility == "loss_gradient":
        return [sum(_mean_abs(_one_gradient(view), unit, 0.0) for view in views) for unit in range(units)]
    if utility == "gxd_all_logit":
        per_class = []
        for klass in range(len(_class_gradients(views[0]))):
            gradients = [_class_gradients(view)[klass] for view in views]
            scores = [_effect_score("gxd", views, gradients, unit, absolute_positions) for unit in range(units)]
            per_class.append(scores)
        return [sum(of_class[unit] for of_class in per_class) / len(per_class) for unit in range(units)]
    gradients = [_one_gradient(view) for view in views]
    return [_effect_score(utility, views, gradients, unit, absolute_positions) for unit in range(units)]


def _local_score(
    utility: str,
    views: Sequence[View],
    w_in: Sequence[Tensor] | None,
    w_out: Sequence[Sequence[Tensor]] | None,
    unit: int,
) -> float:
    score = 0.0
    for index, view in enumerate(views):
        centre = _reference(view, unit) if utility.startswith("mc_") else 0.0
        term = _mean_abs(view.h, unit, centre)
        if utility != "activation":
            assert w_out is not None, f"{utility} needs w_out"
            term *= _sum_abs(w_out[index][unit])
        score += term
    if utility == "mc_adaptable_contribution":
        assert w_in is not None, f"{utility} needs w_in"
        score /= _sum_abs(w_in[unit])
    return score


def _effect_score(
    utility: str, views: Sequence[View], gradients: Sequence[Tensor], unit: int, absolute_positions: bool
) -> float:
    """Mean over the examples of the absolute first-order effect of moving the unit to r (for gxi: to 0, for
    output_gradient: by 1), squared for gxd_kl.
    """
    examples = views[0].h.shape[0]
    total = 0.0
    for example in range(examples):
        effect = 0.0
        for view, gradient in zip(views, gradients, strict=True):
            assert view.h.shape[0] == examples
            assert view.h.shape == gradient.shape
            centre = _reference(view, unit) if utility.startswith("gxd") else 0.0
            for position in range(view.h.shape[1]):
                h, g = float(view.h[example, position, unit]), float(gradient[example, position, unit])
                moved = 1.0 if utility == "output_gradient" else h - centre
                effect += abs(moved * g) if absolute_positions else moved * g
        total += effect * effect if utility == "gxd_kl" else abs(effect)
    return total / examples


def _mean_abs(values: Tensor, unit: int, centre: float) -> float:
    examples, positions, _ = values.shape
    total = 0.0
    for example in range(examples):
        for position in range(positions):
            total += abs(float(values[example, position, unit]) - centre)
    return total / (examples * positions)


def _sum_abs(weights: Tensor) -> float:
    return sum(abs(float(weight)) for weight in weights.flatten())


def _reference(view: View, unit: int) -> float:
    assert view.r is not None, "this utility needs the references of every view"
    return float(view.r[unit])


def _one_gradient(view: View) -> Tensor:
    assert isinstance(view.g, Tensor), "this utility needs one gradient per view"
    return view.g


def _class_gradients(view: View) -> Sequence[Tensor]:
    assert view.g is not None, "gxd_all_logit needs one gradient per class and view"
    assert not isinstance(view.g, Tensor), "gxd_all_logit needs one gradient per class and view"
    return view.g


def _own_label(logits: Tensor, u: float) -> Tensor:
    """onehot(y) - p of one example: y is the first class at which the probabilities so far exceed u."""
    weights = [math.exp(float(z) - float(logits.max())) for z in logits]
    p = [weight / sum(weights) for weight in weights]
    label = 0
    while label < len(p) - 1 and sum(p[: label + 1]) <= u:
        label += 1
    return torch.tensor([(klass == label) - p[klass] for klass in range(len(p))], dtype=torch.float64)


# ---- selection


def naive_select(
    utilities: Sequence[float], ages: Sequence[int], budget: float, *, rate: float, maturity: int
) -> tuple[list[int], float]:
    """The units of one group to reset now, in ascending order of index, and the budget that is left."""
    eligible = [unit for unit in range(len(ages)) if ages[unit] > maturity]
    budget += rate * len(eligible)
    k = min(math.floor(budget), len(eligible))
    cheapest_first = sorted(eligible, key=lambda unit: (utilities[unit], unit))
    return sorted(cheapest_first[:k]), budget - k


# ---- training


@dataclass(frozen=True)
class StepRecord:
    """What one step did. Statistics are those the selection saw, before any reset.

    scores, ages, references, utilities: by group and unit; utilities are bias-corrected.
    parameters: weight, bias, weight, bias, ... in the order of `nn.Sequential(...).parameters()`.
    `parameters_before_reset` are after the optimizer step, `parameters` after the resets.
    resets: (group, units in ascending order), only groups that reset something.
    """

    loss: float
    scores: list[list[float]]
    ages: list[list[int]]
    references: list[list[float]]
    utilities: list[list[float]]
    resets: list[tuple[int, list[int]]]
    parameters_before_reset: list[Tensor]
    parameters: list[Tensor]


@dataclass
class NaiveCBP:
    """Continual Backpropagation on an MLP: Linear, activation, Linear, ..., Linear.

    Group l holds the outputs of layer l; its consumer is layer l + 1. The last layer is never reset. A layer
    may have no bias (None); then its inputs are reset without compensation. `step` is one optimizer step.
    """

    weights: list[Tensor]
    biases: list[Tensor | None]
    activation: Callable[[Tensor], Tensor]
    utility: str
    fresh: Fresh
    rate: float = 1e-4
    maturity: int = 100
    decay: float = 0.99
    optimizer: Literal["sgd", "momentum", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy
    compensate: bool = True
    by_age: bool = False

    # The state of a unit, by group and unit, and the fractional budget, by group.
    age: list[list[int]] = field(init=False)
    mean: list[list[float]] = field(init=False)
    raw_utility: list[list[float]] = field(init=False)
    budget: list[float] = field(init=False)
    # The optimizer's: by layer and kind ("weight" or "bias"), then by torch's name of the state.
    optimizer_state: list[dict[str, dict[str, Tensor]]] = field(init=False)
    optimizer_steps: int = field(default=0, init=False)
    history: list[StepRecord] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.weights = [weight.detach().double().clone() for weight in self.weights]
        self.biases = [None if bias is None else bias.detach().double().clone() for bias in self.biases]
        groups = self.weights[:-1]
        self.age = [[0] * len(weight) for weight in groups]
        self.mean = [[0.0] * len(weight) for weight in groups]
        self.raw_utility = [[0.0] * len(weight) for weight in groups]
        self.budget = [0.0] * len(groups)
        state_names = {"sgd": [], "momentum": ["momentum_buffer"], "adam": ["exp_avg", "exp_avg_sq"]}
        self.optimizer_state = [
            {
                kind: {name: torch.zeros_like(tensor) for name in state_names[self.optimizer]}
                for kind, tensor in (("weight", weight), ("bias", bias))
                if tensor is not None
            }
            for weight, bias in zip(self.weights, self.biases, strict=True)
        ]

    @classmethod
    def of_linears(
        cls,
        linears: Sequence[nn.Linear],
        *,
        activation: Callable[[Tensor], Tensor],
        utility: str,
        fresh: Fresh,
        **options: object,
    ) -> "NaiveCBP":
        """Start from the weights of these layers (copied, in float64)."""
        weights, biases = [layer.weight for layer in linears], [layer.bias for layer in linears]
        return cls(weights, biases, activation, utility, fresh, **options)  # type: ignore[arg-type]

    # ---- reading

    def parameters(self) -> list[Tensor]:
        """Copies, in the order weight, bias, weight, bias, ..."""
        pairs = zip(self.weights, self.biases, strict=True)
        return [tensor.clone() for pair in pairs for tensor in pair if tensor is not None]

    def references(self) -> list[list[float]]:
        """r = f / (1 - eta^a) by group and unit; 0 at age 0."""
        return self._bias_corrected(self.mean)

    def utilities(self) -> list[list[float]]:
        """u / (1 - eta^a) by group and unit; 0 at age 0."""
        return self._bias_corrected(self.raw_utility)

    def logits(self, x: Tensor, clamp: dict[tuple[int, int], float] | None = None) -> Tensor:
        """The network's output, with the hidden units (group, unit) held at the given values."""
        return self._forward(x, self.weights, self.biases, clamp or {})[1]

    def _bias_corrected(self, average: list[list[float]]) -> list[list[float]]:
        return [
            [value / (1 - self.decay**age) if age > 0 else 0.0 for value, age in zip(values, ages, strict=True)]
            for values, ages in zip(average, self.age, strict=True)
        ]

    # ---- one step of Algorithm 1

    def step(self, x: Tensor, y: Tensor, noise: Tensor | None = None) -> StepRecord:
        """Train step, then ages, references, utilities, selection and resets.

        x: (examples, features). y: what the loss takes; the class of each example for target-logit utilities.
        noise: (examples, classes), the random sign vectors, for `gxd_sketch`; (examples,), in [0, 1), from which the
        labels of `gxd_kl` follow.
        """
        weights = [weight.clone().requires_grad_() for weight in self.weights]
        biases = [None if bias is None else bias.clone().requires_grad_() for bias in self.biases]
        hidden, logits = self._forward(x, weights, biases, {})
        loss = self.loss(logits, y)
        gradients = self._score_gradients(hidden, logits, loss, y, noise)
        torch.autograd.backward(loss)
        self._optimizer_step(weights, biases)
        before_reset = self.parameters()

        scores = []
        for group, h in enumerate(hidden):
            scores.append(self._update_statistics(group, h.detach(), gradients[group]))
        ages, references, utilities = [list(ages) for ages in self.age], self.references(), self.utilities()

        chosen = []
        for group in range(len(hidden)):
            ranked = utilities[group]
            if self.by_age:
                ranked = [utility / max(age, 1) for utility, age in zip(ranked, ages[group], strict=True)]
            units, self.budget[group] = naive_select(
                ranked, ages[group], self.budget[group], rate=self.rate, maturity=self.maturity
            )
            chosen.append(units)
        self.reset(chosen)

        resets = [(group, units) for group, units in enumerate(chosen) if units]
        record = StepRecord(loss.item(), scores, ages, references, utilities, resets, before_reset, self.parameters())
        self.history.append(record)
        return record

    def _forward(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        clamp: dict[tuple[int, int], float],
    ) -> tuple[list[Tensor], Tensor]:
        hidden: list[Tensor] = []
        signal = x.double()
        for layer in range(len(weights) - 1):
            signal = self.activation(nn.functional.linear(signal, weights[layer], biases[layer]))
            for (group, unit), value in clamp.items():
                if group == layer:
                    signal = signal.clone()
                    signal[:, unit] = value
            hidden.append(signal)
        return hidden, nn.functional.linear(signal, weights[-1], biases[-1])

    def _score_gradients(
        self, hidden: list[Tensor], logits: Tensor, loss: Tensor, y: Tensor, noise: Tensor | None
    ) -> list[Tensor | list[Tensor] | None]:
        """What `View.g` wants, for each group, at the parameters before the update."""
        if self.utility in LOCAL_UTILITIES:
            return [None for _ in hidden]
        if self.utility in LOSS_UTILITIES:
            return [gradient[:, None, :] for gradient in torch.autograd.grad(loss, hidden, retain_graph=True)]
        examples, classes = logits.shape
        if self.utility in TARGET_LOGIT_UTILITIES:
            directions = [nn.functional.one_hot(y, classes)]
        elif self.utility == "gxd_sketch":
            assert noise is not None, "gxd_sketch needs signs"
            assert noise.shape == logits.shape
            directions = [noise]
        elif self.utility == "gxd_kl":
            assert noise is not None, "gxd_kl needs a number for each label"
            directions = [
                torch.stack([_own_label(*pair) for pair in zip(logits.detach(), noise.tolist(), strict=True)])
            ]
        else:
            directions = [nn.functional.one_hot(torch.full((examples,), klass), classes) for klass in range(classes)]
        by_direction = [self._directional_gradients(hidden, logits, direction) for direction in directions]
        if self.utility == "gxd_all_logit":
            return [list(of_group) for of_group in zip(*by_direction, strict=True)]
        return list(by_direction[0])

    def _directional_gradients(self, hidden: list[Tensor], logits: Tensor, direction: Tensor) -> list[Tensor]:
        """For each group d(direction[e] . logits[e]) / d hidden[e], one backward pass per example e."""
        gradients = [torch.zeros_like(h) for h in hidden]
        for example in range(logits.shape[0]):
            scalar = (direction[example].double() * logits[example]).sum()
            for group, gradient in enumerate(torch.autograd.grad(scalar, hidden, retain_graph=True)):
                gradients[group][example] = gradient[example]
        return [gradient[:, None, :] for gradient in gradients]

    def _optimizer_step(self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> None:
        self.optimizer_steps += 1
        for layer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            state = self.optimizer_state[layer]
            assert weight.grad is not None
            self.weights[layer] = self.weights[layer] - self._optimizer_update(weight.grad, state["weight"])
            if bias is not None:
                old = self.biases[layer]
                assert old is not None
                assert bias.grad is not None
                self.biases[layer] = old - self._optimizer_update(bias.grad, state["bias"])

    def _optimizer_update(self, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        if self.optimizer == "sgd":
            return self.lr * gradient
        if self.optimizer == "momentum":
            state["momentum_buffer"] = self.momentum * state["momentum_buffer"] + gradient
            return self.lr * state["momentum_buffer"]
        beta1, beta2 = self.betas
        state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * gradient
        state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient * gradient
        first = state["exp_avg"] / (1 - beta1**self.optimizer_steps)
        second = state["exp_avg_sq"] / (1 - beta2**self.optimizer_steps)
        return self.lr * first / (second.sqrt() + self.eps)

    def _update_statistics(self, group: int, h: Tensor, g: Tensor | list[Tensor] | None) -> list[float]:
        """Age, then mean, then the score with the reference that includes this batch, then utility."""
        examples, units = h.shape
        for unit in range(units):
            self.age[group][unit] += 1
            batch_mean = sum(float(h[example, unit]) for example in range(examples)) / examples
            self.mean[group][unit] = self.decay * self.mean[group][unit] + (1 - self.decay) * batch_mean
        view = View(h[:, None, :], g, self.references()[group])
        w_in = [self.weights[group][unit, :] for unit in range(units)]
        w_out = [[self.weights[group + 1][:, unit] for unit in range(units)]]
        scores = naive_scores(self.utility, [view], w_in, w_out)
        if self.utility == "gxd_loss":  # shares of the group, so that the scale of the loss does not matter
            scores = [score * units / sum(scores) for score in scores]
        for unit in range(units):
            self.raw_utility[group][unit] = self.decay * self.raw_utility[group][unit] + (1 - self.decay) * scores[unit]
        return scores

    # ---- the reset operator

    def reset(self, chosen: Sequence[Sequence[int]]) -> None:
        """R_S for the chosen units of every group at once: masks first, then every write.

        The bias of a chosen unit ends at 0 even where another chosen unit has just been compensated in it.
        The optimizer state of a compensated bias stays: the bias is moved, not made anew.
        """
        references = self.references()
        units_in_order = [(group, unit) for group, units in enumerate(chosen) for unit in units]
        for group, unit in units_in_order:
            bias = self.biases[group + 1]
            if self.compensate and bias is not None:
                for k in range(len(bias)):
                    bias[k] += float(self.weights[group + 1][k, unit]) * references[group][unit]
        for group, unit in units_in_order:
            fan_in = self.weights[group].shape[1]
            self.weights[group][unit, :] = self.fresh(group, unit, fan_in).detach().double()
            bias = self.biases[group]
            if bias is not None:
                bias[unit] = 0.0
        for group, unit in units_in_order:
            self.weights[group + 1][:, unit] = 0.0
        for group, unit in units_in_order:
            for incoming in self.optimizer_state[group].values():
                for state in incoming.values():
                    state[unit] = 0.0
            for state in self.optimizer_state[group + 1]["weight"].values():
                state[:, unit] = 0.0
        for group, unit in units_in_order:
            self.age[group][unit] = 0
            self.mean[group][unit] = 0.0
            self.raw_utility[group][unit] = 0.0


# ---- clamping


def naive_clamp_logits(
    model: nn.Module,
    module_name: str,
    columns: Sequence[int],
    value: float | Sequence[float] | Tensor,
    x: Tensor | tuple[Tensor, ...],
) -> Tensor:
    """The model's output while input columns of one consumer are held at a value (or one value per column).

    Columns are the last dimension of a Linear's input and dimension 1 of a convolution's. The model runs in
    the mode it is in: put it in eval mode first if it has dropout or BatchNorm.
    """
    module = model.get_submodule(module_name)
    if isinstance(module, nn.Linear):
        dimension = -1
    elif isinstance(module, CONVOLUTIONS):
        dimension = 1
    else:
        raise TypeError(f"{module_name} is a {type(module).__name__}, neither Linear nor convolution")
    values = [float(v) for v in torch.as_tensor(value, dtype=torch.float64).expand(len(columns))]
    calls = 0

    def clamp(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        seen = args[0].clone()
        for column, held in zip(columns, values, strict=True):
            seen.select(dimension, column).fill_(held)
        return (seen, *args[1:])

    handle = module.register_forward_pre_hook(clamp)
    try:
        with torch.no_grad():
            logits: Tensor = model(*x) if isinstance(x, tuple) else model(x)
    finally:
        handle.remove()
    if calls == 0:
        raise RuntimeError(f"{module_name} was never called, so nothing was clamped")
    return logits
