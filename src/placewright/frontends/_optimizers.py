"""
Optimisers whose update is captured: SGD, SGD with momentum, Adam, AdamW.

One parameter's update is one of PyTorch's fused calls, which exist for CPUs and GPUs alike, with
the state that `torch.optim` would keep.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch

from placewright.errors import InputError

_NAMED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.001}),
    "adamw": (torch.optim.AdamW, {"lr": 0.001}),
}


LIVE = {
    "lr": "float({}['lr'])",
    "weight_decay": "float({}['weight_decay'])",
    "maximize": "bool({}['maximize'])",
    "momentum": "float({}['momentum'])",
    "dampening": "float({}['dampening'])",
    "nesterov": "bool({}['nesterov'])",
    "beta1": "float({}['betas'][0])",
    "beta2": "float({}['betas'][1])",
    "eps": "float({}['eps'])",
}
"""What a call of an update is given of its settings, by argument, as Python source."""

STATE_KEYS = {"momentum": "momentum_buffer"}
"""What `torch.optim` calls a parameter's state where that is not its name here."""


def make_optimizer(name: str, module: torch.nn.Module) -> torch.optim.Optimizer:
    """
    Make an optimiser by its name.

    Raises
    ------
    InputError
        There is none of this name.
    """
    if name not in _NAMED:
        known = ", ".join(f"`{name}`" for name in _NAMED)
        raise InputError(f"There is no optimizer `{name}`. Those that work are {known}.")
    kind, chosen = _NAMED[name]
    return kind(module.parameters(), **chosen)


def read_optimizer(optimizer: str | torch.optim.Optimizer, module: torch.nn.Module) -> Updater:
    """
    Read an optimiser's kind and settings.

    Raises
    ------
    InputError
        It is unknown, or it is not over this module's parameters.
    """
    known = ", ".join(f"`{name}`" for name in _NAMED)
    names = {id(tensor): name for name, tensor in module.named_parameters()}
    if isinstance(optimizer, str):
        if optimizer not in _NAMED:
            raise InputError(f"There is no optimizer `{optimizer}`. Those that work are {known}.")
        kind, chosen = _NAMED[optimizer]
        arguments = inspect.signature(kind).parameters.values()
        settings = {a.name: a.default for a in arguments if a.default is not a.empty} | chosen
        return Updater(kind, dict.fromkeys(names.values(), settings))
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        raise InputError(
            f"`optimizer` is a {type(optimizer).__name__}; expected torch.optim.SGD, Adam or AdamW,"
            f" or one of {known}."
        )
    groups = {}
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) not in names:
                raise InputError(
                    "`optimizer` has a parameter that `module` does not. Make it with"
                    " `module.parameters()`."
                )
            groups[names[id(tensor)]] = group
    return Updater(type(optimizer), groups)


class Rate:
    """A group's learning rate on a device, for calls that are replayed as they were recorded."""

    def __init__(self, group: dict[str, Any], device: torch.device) -> None:
        self._group, self._device = group, device
        self._value: float | None = None  # what was written last
        self._tensor: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """Return it as a tensor, made when it is first read and kept current by `refresh`."""
        if self._tensor is None:
            self._tensor = torch.empty((), device=self._device)
            self.refresh()
        return self._tensor

    def refresh(self) -> None:
        """Write the learning rate to where it is read, if it has changed."""
        now = float(self._group["lr"])
        if self._tensor is not None and now != self._value:
            self._value = now
            self._tensor.fill_(now)


@dataclass(frozen=True, eq=False)
class Updater:
    """Updates one parameter at a time, as the optimiser `kind` with its groups' `settings`."""

    kind: type[torch.optim.Optimizer]
    settings: dict[str, dict[str, Any]]  # of each parameter: its group in the optimiser
    fresh: set[str] = field(default_factory=set)  # parameters without a step so far
    _rates: dict[tuple[int, torch.device], Rate] = field(default_factory=dict)

    def rate_on(self, name: str, device: torch.device) -> Rate:
        """Return the learning rate of one parameter for calls on a device."""
        group = self.settings[name]
        return self._rates.setdefault((id(group), device), Rate(group, device))

    def refresh_rates(self) -> None:
        """Write learning rates that have changed to where they are read."""
        for rate in self._rates.values():
            rate.refresh()

    def make_state(self, name: str, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Make what the optimiser remembers of one parameter."""
        if name not in self.settings:
            return {}
        group = self.settings[name]
        if self.kind is torch.optim.SGD:
            return {"momentum": torch.empty_like(parameter)} if group["momentum"] else {}
        labels = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
        step = torch.empty((), dtype=torch.float32)
        return {label: torch.empty_like(parameter) for label in labels} | {"step": step}

    def update(
        self,
        name: str,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: dict[str, torch.Tensor],
    ) -> None:
        """Overwrite one parameter and its state."""
        if name not in self.settings:
            return
        group = self.settings[name]
        common: dict[str, Any] = {
            "lr": float(group["lr"]),
            "weight_decay": float(group["weight_decay"]),
            "maximize": bool(group["maximize"]),
        }
        if self.kind is torch.optim.SGD:
            torch._fused_sgd_(
                [parameter],
                [gradient],
                [state["momentum"]] if state else [],
                momentum=float(group["momentum"]),
                dampening=float(group["dampening"]),
                nesterov=bool(group["nesterov"]),
                is_first_step=False,
                **common,
            )
            return
        state["step"].add_(1)
        is_adamw = group.get("decoupled_weight_decay", self.kind is torch.optim.AdamW)
        fused = torch._fused_adamw_ if is_adamw else torch._fused_adam_
        fused(
            [parameter],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
            [state["step"]],
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            amsgrad=bool(group["amsgrad"]),
            **common,
        )
