"""UPGD: utility-based perturbed gradient descent. Useless weights are perturbed, useful ones protected."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gxd import arguments
from gxd.errors import PlanError
from gxd.methods.base import Host, Method
from gxd.methods.registry import register_method
from gxd.reset.fresh import fixed_rows, holding


class Averages(NamedTuple):
    """The state of :class:`UPGD`.

    Attributes:
        sums: parameter name -> the running average of ``-g w``, not corrected for its start.
        counts: parameter name -> how many steps are in it.
    """

    sums: dict[str, Tensor]
    counts: dict[str, int]


class UPGD(Method):
    """Gates and perturbs gradients by the utility of their weights. The arguments are those of :func:`upgd`."""

    def __init__(self, decay: float, noise: float, weight_decay: float, protect: bool) -> None:
        self.decay = arguments.number("decay", decay, 0.0, 1.0)
        if self.decay == 1.0:
            raise ValueError(f"decay={decay!r} must be below 1: nothing would ever enter the average")
        self.noise = arguments.number("noise", noise, 0.0)
        self.weight_decay = arguments.number("weight_decay", weight_decay, 0.0)
        arguments.switch("protect", protect)
        self.protect = protect

    def init(self, host: Host) -> Averages:
        named = dict(host.model.named_parameters())  # also what is frozen now: it may be trained later
        if self.weight_decay:
            host.need_rates(self.name, named, "use weight_decay=0.0")
        kinds = {name: torch.promote_types(p.dtype, torch.float32) for name, p in named.items()}
        sums = {name: torch.zeros_like(p, dtype=kinds[name], requires_grad=False) for name, p in named.items()}
        return Averages(sums, dict.fromkeys(named, 0))

    def before_step(self, host: Host, state: Averages) -> Averages:
        parameters = (one for one in host.trained() if one.parameter.numel())
        graded = [(one, one.parameter.grad) for one in parameters if one.parameter.grad is not None]
        for one, gradient in graded:
            if gradient.layout is not torch.strided:
                raise PlanError(
                    f"the gradient of {one.name!r} is sparse, and upgd perturbs all weights: make it dense "
                    "(sparse=False of the embedding)"
                )
        if not graded:
            return state
        sums, counts = dict(state.sums), dict(state.counts)
        for one, gradient in graded:
            gain = (1.0 - self.decay) / host.grad_scale * (1.0 if one.maximize else -1.0)
            new = (self.decay * sums[one.name]).addcmul_(gradient, one.parameter, value=gain)
            # What is not finite would stay for ever, and in the maximum it would open or shut all gates.
            sums[one.name] = torch.where(new.isfinite(), new, sums[one.name])
            counts[one.name] += 1
        weights = {name: 1.0 - self.decay**count for name, count in counts.items() if count}
        largest = [(sums[name].max() / weight).to(host.device) for name, weight in weights.items()]
        most = host.processes.agree(torch.stack(largest).max())
        # Where no weight is useful, the sign of the largest says nothing: those that harm move freely.
        most = most.clamp(min=torch.finfo(most.dtype).tiny / torch.finfo(most.dtype).eps)
        # On the device, from a seed of this step's: to draw on the host would take longer than all the rest.
        seed = int(torch.randint(2**62, (), generator=host.generator))
        generators = {g.device: torch.Generator(g.device).manual_seed(seed) for _, g in graded}
        fixed = fixed_rows(host.model)
        for one, gradient in graded:
            rows = fixed.get(id(one.parameter), ())
            scale = -weights[one.name] * most.to(gradient.device)
            gate = (sums[one.name] / scale).sigmoid_()  # 1 - sigmoid(u / max u)
            with holding(gradient, rows), holding(one.parameter, rows):
                if self.noise:
                    noise = torch.empty_like(gradient)
                    noise.normal_(0.0, self.noise * host.grad_scale, generator=generators[gradient.device])
                    gradient.add_(noise if self.protect else noise.mul_(gate))
                if self.protect:
                    gradient.mul_(gate)
                if self.weight_decay:
                    one.parameter.mul_(1.0 - one.rate * self.weight_decay)
        return Averages(sums, counts)


@register_method(
    "upgd",
    description="perturb useless weights and protect useful ones, by the gradient times the weight",
    reference="Elsayed, Mahmood: Addressing Loss of Plasticity and Catastrophic Forgetting in Continual Learning, "
    "ICLR 2024",
    inert={"protect": False, "noise": 0.0, "weight_decay": 0.0},
    changes="gradients, weights by their decay",
)
def upgd(decay: float = 0.999, noise: float = 1e-3, weight_decay: float = 1e-3, protect: bool = True) -> UPGD:
    """``w <- (1 - lr weight_decay) w - lr (g + xi) (1 - sigmoid(u / max u))``, with ``xi ~ N(0, noise^2)``.

    The utility u of a weight is the bias-corrected running average of ``-g w``, to first order what the loss would rise
    by without it; the maximum is over all weights. Published as an optimizer; here it rewrites the gradient, and
    the user's optimizer takes the step, with plain SGD the published one. Read in the authors' README and optimizers
    (first order, global, scaled by the maximum); what differs here:

    - The maximum is over *corrected* utilities. The authors' is not, though what it divides is: with a decay of 0.9999
      all gates are open or shut for some 10,000 steps.
    - Steps are of size ``lr``, as in the authors' experiments; their README has ``2 lr``, for a gate of 1/2 at u = 0.
    - Where no utility is positive, the maximum counts as tiny, so that weights that harm move freely; divided by a
      negative maximum, they would be protected.
    - With momentum the noise and the gates of past steps go on acting. Adam divides a gate out again where it is
      steady, so that little of the protection is left; what remains is the noise and the differences between steps.
    - With several optimizers the maximum is over what is known of all of them when one steps.
    - A step whose ``g w`` is not finite leaves the average of that weight as it is.
    - The row of a padding token (``padding_idx``), which nothing trains, is neither perturbed nor decayed.
    - Nothing is learnt of weights that another method has reset: their averages catch up at the pace of the decay.

    Args:
        decay: of the average; the paper's grid is 0.99 to 0.9999.
        noise: the standard deviation of what is added to gradients; 1e-3 in the authors' README, the paper's grid is
            0.01 to 1.
        weight_decay: decoupled, of all parameters that have a gradient; the paper's grid is 0 to 0.1.
        protect: False: the gate is on the noise alone, ``g + xi (1 - sigmoid(u))``, the paper's non-protecting form.
    """
    return UPGD(decay, noise, weight_decay, protect)
