"""
placewright: which device runs which operation of a neural network.

The public names, by what they are for:

* a model: `capture` (`Capture`), `load_model`, `Graph`, `Op`, `Output`
* a machine: `Cluster`, `load_cluster`, `probe` (this one, measured)
* the question: `Problem`, `load_problem`, `Costs`, `coarsen`, `split_cycles`
* an answer: `place` (`Result`, `Budget`), or one of your own
* how good it is: `Candidate`, `simulate`, `simulate_many`, `default_triggers`,
  `Timeline`, `lower_bounds`, `save_trace`, `Plan`
* running it: `apply`, `TrainStep`; at other shapes: `carry_over`
* `InputError`, for input that cannot be used

They are loaded when first used, so that ``import placewright`` is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from placewright.bounds import Bounds, lower_bounds
    from placewright.carrying import carry_over
    from placewright.cluster import Cluster
    from placewright.coarsening import Coarse, coarsen, split_cycles
    from placewright.costs import Costs
    from placewright.errors import InputError
    from placewright.execute.applying import apply
    from placewright.execute.measured import MeasuredEvaluator
    from placewright.execute.measuring import Measurement, measure
    from placewright.execute.probing import probe
    from placewright.execute.train_step import TrainStep
    from placewright.frontends.torch import Capture, capture
    from placewright.graph import Graph
    from placewright.graph_file import Op, Output
    from placewright.load import load_cluster, load_model, load_problem
    from placewright.placers.run import Budget
    from placewright.placing import Result, place
    from placewright.plan import Plan
    from placewright.problem import Candidate, Problem
    from placewright.simulator import Batch, default_triggers, simulate, simulate_many
    from placewright.timeline import Step, Timeline, Transfers
    from placewright.trace import save_trace

__version__ = "0.1.0.dev0"

_MODULES = {
    "bounds": ("Bounds", "lower_bounds"),
    "carrying": ("carry_over",),
    "cluster": ("Cluster",),
    "coarsening": ("Coarse", "coarsen", "split_cycles"),
    "costs": ("Costs",),
    "errors": ("InputError",),
    "execute.applying": ("apply",),
    "execute.train_step": ("TrainStep",),
    "execute.measured": ("MeasuredEvaluator",),
    "execute.measuring": ("Measurement", "measure"),
    "execute.probing": ("probe",),
    "frontends.torch": ("Capture", "capture"),
    "graph": ("Graph",),
    "graph_file": ("Op", "Output"),
    "load": ("load_cluster", "load_model", "load_problem"),
    "placers.run": ("Budget",),
    "placing": ("Result", "place"),
    "plan": ("Plan",),
    "problem": ("Candidate", "Problem"),
    "simulator": ("Batch", "default_triggers", "simulate", "simulate_many"),
    "timeline": ("Step", "Timeline", "Transfers"),
    "trace": ("save_trace",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_MODULE_OF, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'placewright' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"placewright.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
