"""
The learned placers by name, with everything that can be set about them; needs no PyTorch to read.

This module owns the presets. `colocrl` is Mirhoseini et al., "Device Placement Optimization with
Reinforcement Learning" (2017). `hierarchical` has the settings of their "A Hierarchical Model for
Device Placement" (2018), `hierarchical-grappler` those of the code that was released for it,
without its mistakes; `hierarchical-plus` adds what the paper's critics asked for.
docs/learned.md maps each point of the papers to the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from placewright.errors import InputError
from placewright.policies.rewards import Baseline, Failure, Reward

Grouping = Literal["learned", "random", "none"]
Fit = Literal["none", "mask"]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a policy is trained; the defaults are the papers'."""

    reward: Reward = "sqrt"
    failure: Failure = "constant"
    failure_s: float = 100.0  # the failing signal
    baseline: Baseline = "moving-average"
    baseline_decay: float = 0.9
    baseline_begins_failing: bool = False  # at the failing signal, not at the first batch's mean
    failures_ignored_after: int | None = 1000  # updates; None: never
    learning_rate: float = 0.1
    learning_rate_decay: float = 1.0  # every `decay_every` updates after `decay_after`
    decay_every: int = 50
    decay_after: int = 0
    clip_norm: float = 1.0
    temperature: float = 10.0
    tanh_constant: float = 5.0  # 0: logits are not bounded
    noise: float = 0.0  # added to logits, as a share of their root mean square
    noise_updates: int = 0  # for so many updates
    scaled_advantages: bool = False  # by their standard deviation in a batch
    entropy: float = 0.0  # what a nat of it is worth
    entropy_near: float = 0.0  # at the beginning of a cycle that refines; 0: as in the others
    entropy_end: float = 0.0  # at the end of a cycle, reached by equal factors; 0: it stays
    epochs: int = 1  # steps on one batch of samples, with clipped ratios (PPO) if more than one
    clip_ratio: float = 0.2
    cycle_samples: int | None = None  # after so many begin anew; each cycle is twice the last
    refines: bool = False  # every second cycle begins near the best placement, as long as the last


@dataclass(frozen=True, kw_only=True)
class ColocRL:
    """Places co-located groups, given by rule, with a sequence-to-sequence policy (2017)."""

    max_groups: int = 280
    hidden: int = 256
    num_placements: int = 10
    training: Training = field(default_factory=Training)


@dataclass(frozen=True, kw_only=True)
class Hierarchical:
    """Learns to group ops and to place the groups, both at once (2018)."""

    grouping: Grouping = "learned"  # "random" and "none" are the paper's ablations
    num_groups: int = 256
    groups_per_device: int | None = None  # at most so many for each device
    num_groupings: int = 1  # m
    num_placements: int = 4  # k
    grouper_hidden: int = 64
    hidden: int = 256
    type_size: int = 20
    num_outputs: int = 6  # of an op, that its embedding has room for
    num_dims: int = 4  # of an output
    num_neighbours: int = 6  # on either side
    counts_edges: bool = False  # groups see how many edges there are, both ways, not whether
    any_edges: bool = False  # plus: ops and groups see all their edges, however many
    device_features: bool = False  # plus: devices are told by rate, memory and links
    equal_devices: bool = False  # plus: equal devices are taken into use in order
    tied_layers: bool = False  # plus: layers are cut alike where they are alike
    path_features: bool = False  # plus: critical path, time and memory
    aligned: bool = False  # plus: the decoder sees the group that it places
    follows: bool = False  # plus: at first a group mostly goes where the one before it went
    fit: Fit = "none"  # plus: a device without room is not chosen
    training: Training = field(default_factory=Training)


Settings = ColocRL | Hierarchical

PRESETS: dict[str, Settings] = {
    "colocrl": ColocRL(
        training=Training(
            learning_rate=0.001, failures_ignored_after=5000, tanh_constant=0.0, temperature=1.0
        ),
    ),
    "hierarchical": Hierarchical(),
    "hierarchical-grappler": Hierarchical(
        groups_per_device=20,
        num_placements=1,
        hidden=512,
        num_outputs=5,
        num_dims=5,
        num_neighbours=10,
        counts_edges=True,
        training=Training(
            baseline_begins_failing=True,
            learning_rate_decay=0.95,
            decay_after=400,
            temperature=1.0,
            tanh_constant=1.0,
            noise=0.5,
            noise_updates=750,
        ),
    ),
    "hierarchical-plus": Hierarchical(
        num_groups=64,
        num_groupings=8,
        num_placements=8,
        hidden=64,
        any_edges=True,
        device_features=True,
        equal_devices=True,
        tied_layers=True,
        path_features=True,
        aligned=True,
        follows=True,
        fit="mask",
        training=Training(
            reward="improvement",
            failure="penalty",
            baseline="leave-one-out",
            failures_ignored_after=None,
            learning_rate=0.002,
            temperature=1.0,
            tanh_constant=0.0,
            scaled_advantages=True,
            entropy=0.15,
            entropy_near=0.02,
            entropy_end=0.002,
            epochs=4,
            cycle_samples=4_000,
            refines=True,
        ),
    ),
}
"""The settings of the learned placers, by name."""


POSITIVE = frozenset(
    "max_groups hidden num_placements num_groups groups_per_device num_groupings grouper_hidden"
    " type_size temperature epochs cycle_samples decay_every failure_s clip_norm".split()
)
"""Settings that cannot be zero."""


def change(settings: Settings, options: Mapping[str, Any]) -> Settings:
    """
    Change settings by name, those of training too.

    Raises
    ------
    InputError
        There is no such setting, or the value is none that it can have.
    """
    own = {f.name for f in fields(settings)} - {"training"}
    shared = {f.name for f in fields(Training)}
    for name in options:
        if name not in own | shared:
            known = ", ".join(sorted(own | shared))
            raise InputError(f"There is no option `{name}`. There are: {known}.")
    mine = {k: _value(type(settings), k, v) for k, v in options.items() if k in own}
    theirs = {k: _value(Training, k, v) for k, v in options.items() if k not in own}
    changed = replace(settings, training=replace(settings.training, **theirs), **mine)
    if isinstance(changed, Hierarchical) and changed.hidden % 2:
        raise InputError(
            f"The option `hidden` is `{changed.hidden}`; expected an even number, half of it for"
            " each direction."
        )
    if changed.training.entropy_end and changed.training.cycle_samples is None:
        raise InputError(
            "`entropy_end` is reached at the end of a cycle: set `cycle_samples` too, or"
            " `entropy_end=0`."
        )
    if changed.training.baseline_decay > 1:
        raise InputError(
            f"The option `baseline_decay` is `{changed.training.baseline_decay}`; expected at most"
            " 1."
        )
    if changed.training.noise and changed.training.epochs > 1:
        raise InputError("`noise` goes with one epoch a batch only; set `epochs=1` or `noise=0`.")
    return changed


def _value(owner: type, name: str, value: Any) -> Any:
    """Check a setting's value, read from words if need be (`0.1`, `true`, `none`)."""
    hint = get_type_hints(owner)[name]
    choices = get_args(hint)
    if isinstance(value, str) and not all(isinstance(c, str) for c in choices or ("",)):
        value = None if value.lower() == "none" else value
    kinds = [c for c in choices if c is not type(None)] if type(None) in choices else [hint]
    if choices and all(isinstance(c, str) for c in choices):
        if value not in choices:
            raise InputError(
                f"The option `{name}` is `{value}`; expected one of: {', '.join(choices)}."
            )
        return value
    if value is None and type(None) in choices:
        return None
    return _number(name, value, kinds[0])


def _number(name: str, value: Any, kind: type) -> Any:
    """Check a number or a truth value."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    if kind is bool:
        found = words.get(value.lower()) if isinstance(value, str) else value
        if not isinstance(found, bool):
            raise InputError(f"The option `{name}` is `{value}`; expected `true` or `false`.")
        return found
    try:
        number = kind(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    is_whole = kind is not int or number == (float(value) if number is not None else 0)
    is_wrong = number is None or isinstance(value, bool) or not is_whole
    is_wrong = is_wrong or not 0 <= number < 2**53 or (number == 0 and name in POSITIVE)
    if is_wrong:
        what = "a whole number" if kind is int else "a number"
        least = "above zero" if name in POSITIVE else "that is not negative"
        raise InputError(f"The option `{name}` is `{value}`; expected {what} {least}.")
    return number


def describe(settings: Settings) -> dict[str, Any]:
    """Tell the kind of placer and its settings in plain values."""
    return {"kind": type(settings).__name__, **asdict(settings)}
