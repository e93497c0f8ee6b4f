"""Stable-Baselines3: ``model.learn(..., callback=GxdCallback())``, for DQN, PPO, A2C, SAC, TD3 and DDPG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gxd import arguments
from gxd.attachment import Attachment
from gxd.integrations.base import Session, logged, on_device, required
from gxd.methods.base import Method
from gxd.observe.hooks import Plain

required("stable-baselines3", "2.3", extra="stable-baselines3")

import numpy as np  # noqa: E402
from gymnasium.vector.utils import create_empty_array  # noqa: E402
from stable_baselines3 import A2C, DQN, PPO, SAC, TD3  # noqa: E402
from stable_baselines3.common.callbacks import BaseCallback  # noqa: E402
from stable_baselines3.common.utils import obs_as_tensor  # noqa: E402


class GxdCallback(BaseCallback):
    """Attaches gxd to the networks of an agent for the time of ``learn()``; never to target networks.

    ================  ===============================================================================================
    algorithm         parts, each with its own optimizer
    ================  ===============================================================================================
    DQN               ``q_net``, observed by its Q values
    PPO, A2C          ``policy``, by what its action and value networks return, together
    SAC, TD3, DDPG    ``actor``, by its action or the parameters of its distribution; ``critic``, by all its Q values
    ================  ===============================================================================================

    A pass of the critic for the actor's loss does not count for the critic. What an update has observed and not used,
    as in PPO when it stops early at ``target_kl``, is forgotten.

    Args:
        methods: as for :func:`gxd.attach`; none: the method ``gxd``.
        parts: which of the parts of the table. Default: all.
        plan: part -> plan, for those that are not to be traced.
        verbose: as for every callback.
        options: of :func:`gxd.attach`, and of the method ``gxd`` if no other is given; for all parts.

    Attributes:
        cbps: part -> what is attached; after ``learn()`` closed, but still to be asked.
        cbp: the only one of them, where there is one part.

    Example::

        callback = GxdCallback(replacement_rate=1e-4)
        model.learn(100_000, callback=callback)
        model.save("agent"); torch.save(callback.state_dict(), "agent.gxd.pt")
    """

    def __init__(
        self,
        *methods: Method | str,
        parts: str | Sequence[str] | None = None,
        plan: Mapping[str, Any] | None = None,
        verbose: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(verbose)
        if plan is not None and not isinstance(plan, Mapping):
            raise TypeError(f"plan must be a dict, part -> plan, got {type(plan).__name__}")
        if "example_inputs" in options:
            raise TypeError("'example_inputs' is no option here: the spaces of the environment tell")
        self._methods, self._options = methods, options
        used = Session(methods, options).methods  # says what is wrong with them
        for utility in [method.utility for method in used]:
            if utility is not None and utility.gradient == "target":
                raise ValueError(
                    f"the utility {utility.name!r} needs a target, and an agent has none: use 'gxd_sketch', or one "
                    "that observes no output"
                )
        for method in used:
            if method.output_gradient == "target":
                raise ValueError(
                    f"{method.name} scores weights by the logit of the target, and an agent has none: use "
                    "score='attribution_sketch', or one that observes no output"
                )
        self.parts, self._plans = [parts] if isinstance(parts, str) else parts, dict(plan or {})
        self._sessions: dict[str, Session] = {}
        self._states: dict[str, Any] = {}  # of parts that are not attached yet
        self._stack = ExitStack()  # what has to be undone, besides closing
        self._began: Any = None  # the local variables of the learn() that is under way

    @property
    def cbps(self) -> dict[str, Attachment]:
        """Part -> what is attached."""
        return {name: s.attached for name, s in self._sessions.items() if s.attached is not None}

    @property
    def cbp(self) -> Attachment | None:
        """What is attached, to an agent of one part."""
        found = self.cbps
        if len(found) > 1:
            raise AttributeError(f"cbp: this agent has the parts {', '.join(found)}: use cbps[{next(iter(found))!r}]")
        return next(iter(found.values()), None)

    def state_dict(self) -> dict[str, Any]:
        """Of all parts: to be saved beside the agent."""
        return {**self._states, **{name: session.state_dict() for name, session in self._sessions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there in the next ``learn()``, of the agent that was loaded."""
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be what state_dict() has returned, got {type(state).__name__}")
        self._states = dict(state)

    # --- one learn() --------------------------------------------------------------------------------------------------

    def _on_training_start(self) -> None:
        if self._began is not self.locals:  # else it was given twice
            self._end()
        self._began = self.locals
        try:
            found = _parts(self.model)
            names = list(found) if self.parts is None else list(self.parts)
            for given in (names, self._plans, self._states):
                for name in given:
                    arguments.choice("part", name, list(found))
            for name in names:
                options = {**self._options, "plan": self._plans.get(name)}
                session = self._sessions.setdefault(name, Session(self._methods, options))
                if name in self._states:
                    session.load_state_dict(self._states[name])
                self._attach(session, found[name])
            self._states = {}
        except BaseException:
            self._end()
            raise

    def _attach(self, session: Session, part: _Part) -> None:
        inputs = on_device(part.inputs, part.model) if session.needs_inputs(part.model) else None
        attached = session.begin(part.model, part.optimizer, inputs)
        if session.needs_observe:
            self._observe(attached, part.heads)
        if part.others:
            self._stack.enter_context(_only_on_data(attached))

    def _observe(self, attached: Attachment, heads: Sequence[nn.Module]) -> None:
        """All heads together, when the last one has returned."""
        kept: list[Tensor] = []
        for head in heads[:-1]:
            self._stack.enter_context(_kept(head, kept))

        def together(args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
            outputs = [*kept, *(output if isinstance(output, tuple) else (output,))]
            kept.clear()
            return torch.cat(outputs, 1)

        attached.observe_output(heads[-1], together)

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        for name, attached in self.cbps.items():
            attached.discard()  # what the last update has not used
            for key, value in logged(attached).items():
                # The table in the terminal cuts names at 36 characters, and ends the training if two become the same.
                # So it has the numbers of the network; those of each method are in the files alone.
                hidden = ("stdout", "log") if key.count("/") > 1 else None
                self.logger.record(key.replace("gxd/", f"gxd/{name}/", 1), value, exclude=hidden)

    def _on_training_end(self) -> None:
        self._end()

    def _end(self) -> None:
        self._stack.close()
        for session in self._sessions.values():
            session.end()
        self._began = None


class _Part(NamedTuple):
    """A network of an agent.

    Attributes:
        inputs: that it is called with.
        heads: whose outputs are observed together; the last is called last.
        others: whether other losses than its own run it, too.
    """

    model: nn.Module
    optimizer: Optimizer
    inputs: tuple[Any, ...]
    heads: list[nn.Module]
    others: bool = False


def _parts(agent: Any) -> dict[str, _Part]:
    """What an agent trains."""
    seen = (_zeros(agent.observation_space),)
    if isinstance(agent, DQN):
        return {"q_net": _Part(agent.q_net, agent.policy.optimizer, seen, [agent.q_net])}
    policy = agent.policy
    if isinstance(agent, (PPO, A2C)):
        return {"policy": _Part(policy, policy.optimizer, seen, [policy.action_net, policy.value_net])}
    if isinstance(agent, (SAC, TD3)):
        actor, critic = agent.actor, agent.critic
        deviation = getattr(actor, "log_std", None)  # of TD3 none, with generalized exploration a parameter
        heads = [actor] if isinstance(agent, TD3) else [actor.mu]
        heads += [deviation] if isinstance(deviation, nn.Module) else []
        both = (*seen, _zeros(agent.action_space))
        return {
            "actor": _Part(actor, actor.optimizer, seen, heads),
            "critic": _Part(critic, critic.optimizer, both, [critic], others=True),
        }
    raise TypeError(
        f"{type(agent).__name__} is not one of DQN, PPO, A2C, SAC, TD3, DDPG: attach to its networks yourself, "
        "gxd.attach(network, optimizer, 'gxd', example_inputs=...)"
    )


def _zeros(space: Any) -> Any:
    """Two elements of a space; to draw some would change what the environment draws."""
    zeros: Any = create_empty_array(space, n=2, fn=np.zeros)
    return obs_as_tensor(zeros, torch.device("cpu"))


@contextmanager
def _kept(head: nn.Module, kept: list[Tensor]) -> Iterator[None]:
    """Within this context, what a head returns is kept for the one that is called after it."""

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            kept[:] = [output]

    handle = head.register_forward_hook(Plain(keep))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _only_on_data(attached: Attachment) -> Iterator[None]:
    """Within this context, an attachment sees its network only when that is called with data: a pass for the loss of
    another network has inputs that depend on that one, or calls a part of this.
    """
    model, pause = attached.model, ExitStack()

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not any(isinstance(value, Tensor) and value.requires_grad for value in args):
            pause.close()

    def leave(*call: Any) -> None:
        pause.close()
        pause.enter_context(attached.paused())

    handles = [
        model.register_forward_pre_hook(Plain(enter), prepend=True),
        model.register_forward_hook(Plain(leave), always_call=True),
    ]
    leave()
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        pause.close()
