"""
Training a policy: the loop that all learned placers share.

Samples go to the run's evaluator in batches; their times become costs, the baseline makes
advantages of them, and one step of Adam makes the good choices likelier (Williams' REINFORCE; with
more than one epoch a batch, PPO's clipped ratios). The best sample is the run's, as with any
placer. This module owns the loop, its settings, and what of it a checkpoint holds.

Letters: ``M`` groupings, ``K`` placements for each, ``B`` their product, ``N`` ops.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from placewright.errors import InputError
from placewright.placers.run import Run
from placewright.policies.checkpoint import (
    Identity,
    Scalars,
    Stored,
    load_checkpoint,
    save_checkpoint,
)
from placewright.policies.interrupt import HeldInterrupt
from placewright.policies.rewards import Advantages, AnyBaseline, Pricing, make_baseline
from placewright.policies.seq2seq import Shaping
from placewright.policies.settings import Training

SAVE_EVERY_S = 20.0
"""How often a run with a folder saves a checkpoint."""

SURE, SURE_UPDATES = 1e-3, 100
"""A policy with less entropy than this, in all, for so many updates has made up its mind."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Placements that a policy chose, and how likely they were."""

    placements: NDArray[np.int64]  # [B, N]
    device_log_chance: Tensor  # [B, G] of each device that was chosen
    group_log_chance: Tensor  # [M, C] of each group that was chosen
    entropy: Tensor  # of the choices of devices, in all, the mean over samples
    again: Callable[[], Sample]  # the same choices, as likely as they are by now


class Policy(Protocol):
    """What is trained: networks that choose placements."""

    num_samples: int  # at a time

    @property
    def networks(self) -> nn.Module:
        """What is trained."""
        ...

    def sample(self, random: np.random.Generator, shaping: Shaping) -> Sample:
        """Choose placements."""
        ...


@dataclass(frozen=True)
class Cycle:
    """One of the times that a policy is trained from the beginning, each round finer and longer."""

    number: int
    refines: bool  # every second one begins near the best placement so far

    @property
    def round(self) -> int:
        """Count the rounds before this one."""
        return self.number // 2 if self.refines else self.number

    @property
    def is_near(self) -> bool:
        """Tell whether the policy begins near the best placement so far."""
        return self.refines and self.number % 2 == 1


@dataclass(eq=False)
class _State:
    """Where training stands: all that the next update depends on."""

    policy: Policy
    optimizer: torch.optim.Adam
    random: np.random.Generator
    baseline: AnyBaseline
    cycle: Cycle
    cycle_begin: int  # the run's samples when the cycle began
    update: int = 0  # in this cycle
    sure_for: int = 0  # updates


def train(
    run: Run,
    make_policy: Callable[[Cycle], Policy],
    settings: Training,
    described: dict[str, Any],
) -> None:
    """
    Train policies until the run is over.

    With a folder, Ctrl-C waits for the update that is being made and for a checkpoint; a second one
    does not.

    Parameters
    ----------
    run
        What to place, the budget, where checkpoints go.
    make_policy
        Makes the policy of a cycle, its weights drawn from PyTorch's random numbers.
    settings
        How to train.
    described
        The placer's settings: a checkpoint made with others is refused.

    Raises
    ------
    InputError
        There is a checkpoint that cannot be gone on with, or the weights are no numbers any more.
    KeyboardInterrupt
        Ctrl-C: once what was learned is saved.
    """
    identity = Identity.of(run, described)
    stored = load_checkpoint(run, identity) if run.folder is not None else None
    if stored is None:
        state = _begin(run, make_policy, settings, 0, 0)
    else:
        state = _restore(run, make_policy, settings, stored)
    saved_s = time.perf_counter()
    keeps = run.folder is not None
    with Scalars(run.tensorboard, run.num_samples) as scalars, HeldInterrupt(keeps) as interrupt:
        while not run.is_over:
            if _is_cycle_over(run, state, settings):
                if settings.cycle_samples is None:
                    break
                state = _begin(run, make_policy, settings, state.cycle.number + 1, run.num_samples)
            room = run.room(state.policy.num_samples)
            is_last = room < state.policy.num_samples
            is_due = is_last or interrupt.has_come
            is_due = is_due or time.perf_counter() - saved_s > SAVE_EVERY_S
            if keeps and run.best is not None and is_due:
                save_checkpoint(run, identity, _store(state))
                saved_s = time.perf_counter()
                if interrupt.has_come:
                    raise KeyboardInterrupt
            if is_last:  # too few for an update: whoever goes on begins before them
                run.offer(
                    state.policy.sample(state.random, _shaping(state, settings)).placements[:room]
                )
                return
            scalars.write(run, _update(run, state, settings))
        if keeps:
            save_checkpoint(run, identity, _store(state))


def _begin(
    run: Run, make_policy: Callable[[Cycle], Policy], settings: Training, number: int, samples: int
) -> _State:
    """Begin a cycle with a new policy; the same seed and cycle make the same one."""
    cycle = Cycle(number, settings.refines)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(np.random.SeedSequence([run.seed, number]).generate_state(1)[0]))
        policy = make_policy(cycle)
    pricing = Pricing(settings.reward, settings.failure, settings.failure_s)
    return _State(
        policy,
        torch.optim.Adam(policy.networks.parameters(), lr=settings.learning_rate, fused=True),
        np.random.default_rng([run.seed, number]),
        make_baseline(
            settings.baseline,
            pricing,
            settings.baseline_decay,
            settings.baseline_begins_failing,
        ),
        cycle,
        samples,
    )


def _is_cycle_over(run: Run, state: _State, settings: Training) -> bool:
    """Tell whether the cycle had its samples, or its policy has long made up its mind."""
    if state.sure_for >= SURE_UPDATES:
        return True
    return settings.cycle_samples is not None and _spent(run, state, settings) >= 1


def _spent(run: Run, state: _State, settings: Training) -> float:
    """Give the share of the cycle that is over."""
    if settings.cycle_samples is None:
        return 0.0
    return (run.num_samples - state.cycle_begin) / (settings.cycle_samples * 2**state.cycle.round)


def _shaping(state: _State, settings: Training) -> Shaping:
    noise = settings.noise if state.update < settings.noise_updates else 0.0
    return Shaping(settings.temperature, settings.tanh_constant, noise)


def _update(run: Run, state: _State, settings: Training) -> dict[str, float]:
    """Sample, evaluate, and take one step, or one an epoch; give figures about it."""
    best_s = run.key[1]
    sample = state.policy.sample(state.random, _shaping(state, settings))
    found = run.offer(sample.placements)
    memory = float(run.problem.cluster.memory_bytes.min())
    num_groupings = len(sample.group_log_chance)
    known_s = found.objective_s[np.isfinite(found.objective_s)]
    reference_s = best_s
    if not np.isfinite(best_s):
        reference_s = float(known_s.mean()) if len(known_s) else settings.failure_s
    pricing = Pricing(settings.reward, settings.failure, settings.failure_s)
    fits_s = run.key[1] if run.key[0] == 0 else 0.0
    costs = pricing.cost(found, num_groupings, memory, reference_s, fits_s)
    ignored = settings.failures_ignored_after
    keeps = np.ones_like(costs.has_failed)
    if ignored is not None and state.update >= ignored:
        keeps = ~costs.has_failed
    advantages = state.baseline.advantages(costs, keeps)
    if settings.scaled_advantages and keeps.any():
        scale = max(float(costs.cost[keeps].std()), 1e-3)
        advantages = Advantages(advantages.device / scale, advantages.group / scale)
    for group in state.optimizer.param_groups:
        group["lr"] = _learning_rate(state.update, settings)
    worth = _entropy_worth(state.cycle, _spent(run, state, settings), settings)
    norm = 0.0
    if keeps.any():  # else Adam's momentum would go on by itself
        norm = _step(state, sample, advantages, worth, settings)
    entropy = float(sample.entropy.detach())
    state.update += 1
    state.sure_for = state.sure_for + 1 if entropy < SURE else 0
    return {
        "mean_s": float(found.objective_s.mean()),
        "mean_cost": float(costs.cost.mean()),
        "feasible": float((found.overflow_bytes == 0).mean()),
        "entropy": entropy,
        "gradient_norm": norm,
    }


def _learning_rate(update: int, settings: Training) -> float:
    steps = max(0, update - settings.decay_after) // settings.decay_every
    return float(settings.learning_rate * settings.learning_rate_decay**steps)


def _entropy_worth(cycle: Cycle, spent: float, settings: Training) -> float:
    """Give what entropy is worth: falling by equal factors over a cycle."""
    begin = settings.entropy
    if cycle.is_near and settings.entropy_near:
        begin = settings.entropy_near
    if not begin or not settings.entropy_end:
        return begin
    return float(begin * (settings.entropy_end / begin) ** min(spent, 1.0))


def _step(
    state: _State, sample: Sample, advantages: Advantages, worth: float, settings: Training
) -> float:
    """Make good choices likelier; give the gradient's norm before it is clipped."""
    device = torch.from_numpy(advantages.device.reshape(-1, 1)).float()
    group = torch.from_numpy(advantages.group[:, None]).float()
    old_device = sample.device_log_chance.detach()
    old_group = sample.group_log_chance.detach()
    norm = 0.0
    for epoch in range(settings.epochs):
        if epoch > 0:
            sample = sample.again()
        if settings.epochs == 1:
            loss = (device * sample.device_log_chance).sum(dim=1).mean()
            loss = loss + (group * sample.group_log_chance).sum(dim=1).mean()
        else:
            loss = _clipped(sample.device_log_chance, old_device, device, settings.clip_ratio)
            loss = loss + _clipped(sample.group_log_chance, old_group, group, settings.clip_ratio)
        loss = loss - worth * sample.entropy
        state.optimizer.zero_grad()
        loss.backward()
        parameters = state.policy.networks.parameters()
        norm = float(nn.utils.clip_grad_norm_(parameters, settings.clip_norm))
        if not np.isfinite(norm):
            raise InputError(
                "The policy's gradient is no number any more: its weights have grown too large."
                " Try a smaller `learning_rate`."
            )
        state.optimizer.step()
    return norm


def _clipped(new: Tensor, old: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """Give PPO's loss: a choice that moves further than `clip` from the old one gains nothing."""
    ratio = (new - old).clamp(-20.0, 20.0).exp()
    worse = torch.maximum(advantage * ratio, advantage * ratio.clamp(1 - clip, 1 + clip))
    return worse.sum(dim=1).mean()


def _store(state: _State) -> Stored:
    """Take down all that the next update depends on."""
    tensors = {f"policy/{k}": v for k, v in state.policy.networks.state_dict().items()}
    for index, slot in state.optimizer.state_dict()["state"].items():
        tensors |= {f"adam/{index}/{k}": torch.as_tensor(v) for k, v in slot.items()}
    values = {
        "cycle": state.cycle.number,
        "cycle_begin": state.cycle_begin,
        "update": state.update,
        "sure_for": state.sure_for,
        "random": state.random.bit_generator.state,
        "baseline": vars(state.baseline),
    }
    return Stored(tensors, values)


def _restore(
    run: Run, make_policy: Callable[[Cycle], Policy], settings: Training, stored: Stored
) -> _State:
    """Set training to where a checkpoint was taken."""
    values, tensors = stored.values, stored.tensors
    state = _begin(run, make_policy, settings, values["cycle"], values["cycle_begin"])
    state.update, state.sure_for = values["update"], values["sure_for"]
    state.random.bit_generator.state = values["random"]
    for name, value in values["baseline"].items():
        setattr(state.baseline, name, value)
    weights = {k.removeprefix("policy/"): v for k, v in tensors.items() if k.startswith("policy/")}
    state.policy.networks.load_state_dict(weights)
    slots: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        if key.startswith("adam/"):
            _, index, name = key.split("/")
            slots.setdefault(int(index), {})[name] = value
    told = state.optimizer.state_dict()
    state.optimizer.load_state_dict({"state": slots, "param_groups": told["param_groups"]})
    return state
