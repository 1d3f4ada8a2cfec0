"""
Hooks while modules are captured.

This module owns which hooks are part of a captured step: all of them in a whole step, and those of
inner modules in a call, since the hooks of a placed module itself and of its parameters' gradients
run in each call. Captured hooks run once, so those that change something beside tensors are
refused.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from placewright.errors import InputError

HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""Where a module keeps its hooks."""


@contextlib.contextmanager
def hooks_once(module: torch.nn.Module, *, has_own: bool) -> Iterator[None]:
    """
    Check that what happens meanwhile, which runs hooks, can do so once for many steps.

    With `has_own`, the module's own hooks and those on its parameters' gradients take part;
    otherwise they are left out meanwhile.

    Raises
    ------
    InputError
        A hook changed something beside tensors.
    """
    hooks = [*_find_hooks(module, has_own)]
    before = [_reach(hook) for _, hook in hooks]
    with contextlib.nullcontext() if has_own else _without_own(module):
        yield
    for (name, hook), old in zip(hooks, before, strict=True):
        new = _reach(hook)
        if len(new) != len(old) or any(x is not y for x, y in zip(new, old, strict=True)):
            raise InputError(
                f"A hook on `{name}` keeps something from call to call, and in a plan it runs only"
                " when the plan is applied. Compute that in `forward`, or hook the placed module"
                " itself, whose hooks run in each call."
            )


def _find_hooks(module: torch.nn.Module, has_own: bool) -> Iterator[tuple[str, Any]]:
    for name, part in module.named_modules():
        if part is not module or has_own:
            for held in HOOK_DICTS:
                yield from ((name or "module", hook) for hook in part.__dict__[held].values())
    if not has_own:
        return
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise InputError(
                f"Parameter `{name}` has a hook that runs once its gradient is accumulated, which a"
                " whole step never does. Take it off, or use `placewright.apply`."
            )
        yield from ((name, hook) for hook in (parameter._backward_hooks or {}).values())


@contextlib.contextmanager
def _without_own(module: torch.nn.Module) -> Iterator[None]:
    own = {name: module.__dict__[name] for name in HOOK_DICTS}
    gradients = [(p, p._backward_hooks) for p in module.parameters() if p._backward_hooks]
    module.__dict__.update({name: OrderedDict() for name in own})
    for parameter, _ in gradients:
        parameter._backward_hooks = None
    try:
        yield
    finally:
        module.__dict__.update(own)
        for parameter, hooks in gradients:
            parameter._backward_hooks = hooks


def _reach(hook: Any) -> list[Any]:
    """List what a hook could change: what its variables hold, and what is in that."""
    found: list[Any] = []
    for value in _variables(hook):
        found.append(value)
        if type(value) in (list, set, tuple):
            found += value
        elif type(value) is dict:
            found += [part for pair in value.items() for part in pair]
        elif hasattr(value, "__dict__") and not isinstance(value, (type, types.ModuleType)):
            found += vars(value).values()
    return found


def _variables(hook: Any) -> Iterator[Any]:
    if isinstance(hook, functools.partial):
        yield from (*hook.args, *hook.keywords.values())
        yield from _variables(hook.func)
    elif isinstance(hook, types.MethodType):
        yield hook.__self__
        yield from _variables(hook.__func__)
    elif isinstance(hook, types.FunctionType):
        for cell in hook.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                yield cell.cell_contents
        names = [name for name in hook.__code__.co_names if name in hook.__globals__]
        yield from (hook.__globals__[name] for name in names)
    else:
        yield hook
