"""Wrong arguments of public functions: an answer or a sentence, never a raw exception."""

from __future__ import annotations

import contextlib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import placewright
from placewright import Budget, Candidate, Cluster, Costs, Graph, InputError, Op, Output, Plan
from placewright.comparing import compare_placers
from placewright.evaluate import SimulatedEvaluator
from tests import tiny
from tests.worlds import make_cluster

HUGE = 10**5000
BAD = {
    "None": None,
    "text": "no such thing",
    "nul": "a\0b",
    "nan": float("nan"),
    "infinity": float("inf"),
    "ragged": [[1], [1, 2]],
    "object": object(),
    "negative": -1,
    "huge": HUGE,
    "path": Path("no/such/path"),
    "bytes": b"no/such/path",
    "empty": [],
    "flag": True,
    "floats": [0.5, float("nan")],
    "mapping": {1.5: "a"},
    "texts": ["a", "b"],
    "matrix": np.full((2, 2), np.nan),
    "function": len,
}


def problem():
    return tiny.streamed()


def timeline():
    return placewright.simulate(problem(), [0] * 7)


def plan():
    return Plan.of(timeline(), "p", lower_bound_s=0.0, placer="none")


def fields_of(thing):
    return {field.name: getattr(thing, field.name) for field in fields(thing)}


def calls(folder):
    """Give what is called, with arguments that are right."""
    world = problem()
    line = placewright.simulate(world, [0] * 7)
    made = Plan.of(line, "p", lower_bound_s=0.0, placer="none")
    candidate = {"placement": [0, 1, 0, 1, 0, 1, 0], "triggers": {(1, 0): -1}}
    ordered = {"placement": [0] * 7, "discipline": "priority", "priorities": [1] * 7}
    world.graph.save(folder / "g.graph.json")
    world.cluster.save(folder / "c.toml")
    made.save(folder / "p.json")
    place = {
        "problem": world, "placer": "random", "budget": "3 samples", "budget_s": 0.0,
        "objective": "latency", "overlap": True, "seed": 0, "grouping": None, "progress": None,
        "options": None, "folder": None, "resume": False, "tensorboard": None, "evaluator": None,
    }  # fmt: skip
    many = {"problem": world, "placements": [[0] * 7], "discipline": "fifo", "priorities": None}
    return {
        "lower_bounds": (placewright.lower_bounds, {"problem": world}),
        "carry_over": (
            placewright.carry_over,
            {"plan": made, "made_for": world.graph, "problem": world},
        ),
        "Cluster": (Cluster, fields_of(world.cluster)),
        "Cluster.load": (Cluster.load, {"path": folder / "c.toml"}),
        "Cluster.preset": (Cluster.preset, {"name": "k40x2"}),
        "Cluster.save": (world.cluster.save, {"path": folder / "d.toml"}),
        "Cluster.with_memory": (world.cluster.with_memory, {"memory_bytes": [9, 9], "name": "n"}),
        "Cluster.device_index": (world.cluster.device_index, {"name": "cuda:0"}),
        "coarsen": (placewright.coarsen, {"problem": world, "grouping": [*range(7)]}),
        "split_cycles": (
            placewright.split_cycles,
            {"graph": world.graph, "grouping": [0, 1, 0, 1, 0, 1, 0]},
        ),
        "Coarse.expand": (
            placewright.coarsen(world, [*range(7)]).expand,
            {"placement": [0] * 7},
        ),
        "Costs": (Costs, {"op_ps": [[1, 2]], "scratch_bytes": [[0, 0]], "idle_gain_ps": [[0, 0]]}),
        "Costs.estimate": (
            Costs.estimate,
            {"graph": world.graph, "cluster": world.cluster, "measured_s": None},
        ),
        "Graph": (Graph, fields_of(world.graph)),
        "Graph.build": (Graph.build, {"name": "g", "ops": [Op(name="a", outputs=[Output(1)])]}),
        "Graph.load": (Graph.load, {"path": folder / "g.graph.json"}),
        "Graph.save": (world.graph.save, {"path": folder / "h.graph.json"}),
        "load_cluster": (placewright.load_cluster, {"cluster": "k40x2"}),
        "load_model": (placewright.load_model, {"model": folder / "g.graph.json", "dims": None}),
        "load_problem": (
            placewright.load_problem,
            {"graph": world.graph, "cluster": "k40x2", "memory": "1GiB", "is_profiled": True,
             "say": None},
        ),
        "Budget": (Budget, {"seconds": 1.0, "samples": 1, "idle_seconds": 1.0}),
        "Budget.parse": (Budget.parse, {"text": "60s"}),
        "place": (placewright.place, place),
        "compare_placers": (
            compare_placers,
            {"problem": world, "names": ["heft"], "budget": "1 samples", "objective": "latency",
             "num_seeds": 1},
        ),
        "Result.save": (placewright.place(world, "heft").save, {"folder": folder / "run"}),
        "SimulatedEvaluator": (SimulatedEvaluator, {"problem": world, "objective": "latency"}),
        "evaluate": (SimulatedEvaluator(world).evaluate, {"candidates": [Candidate([0] * 7)]}),
        "Plan.of": (
            Plan.of,
            {"timeline": line, "name": "p", "lower_bound_s": 0.0, "placer": "none"},
        ),
        "Plan.load": (Plan.load, {"path": folder / "p.json"}),
        "Plan.save": (made.save, {"path": folder / "q.json"}),
        "Plan.candidate": (made.candidate, {"problem": world}),
        "Candidate": (Candidate, candidate),
        "Candidate in order": (Candidate, ordered),
        "Problem": (placewright.Problem, fields_of(world)),
        "Problem.check": (world.check, {"candidate": [0] * 7}),
        "default_triggers": (
            placewright.default_triggers,
            {"problem": world, "placement": [0] * 7, "window_bytes": 10},
        ),
        "simulate": (placewright.simulate, {"problem": world, **candidate}),
        "simulate in order": (placewright.simulate, {"problem": world, **ordered}),
        "simulate_many": (placewright.simulate_many, {**many, "num_threads": 1}),
        "save_trace": (placewright.save_trace, {"timeline": line, "path": folder / "t.json"}),
    }  # fmt: skip


TORCH = ("capture", "apply", "TrainStep", "MeasuredEvaluator", "measure", "probe")


def calls_of_torch():
    """Give what is called with a module or measures, with arguments that get as far as is quick."""
    torch = pytest.importorskip("torch")
    module, inputs = torch.nn.Linear(2, 2), torch.ones(1, 2)
    step = {"module": module, "inputs": inputs, "kwargs": None, "loss": None, "optimizer": None}
    world, made = problem(), plan()
    nowhere = placewright.Problem(world.graph, make_cluster(("tpu", "tpu")))  # nothing is started
    rights = (
        {**step, "train": False, "targets": (), "name": "m"},
        {"plan": made, **step},
        {"plan": made, **step},
        {"problem": nowhere, "model": "tiny-gpt2", "prescreen": None, "objective": "latency"},
        {"model": "no-such", "plans": {"p": made}, "cluster": None, "effort": None, "seed": 0},
        {"devices": ["cuda:99"], "name": "n", "progress": None},
    )

    def quietly(function):  # what is right up to here may still not fit this machine
        def call(**arguments):
            with contextlib.suppress(InputError):
                function(**arguments)

        return call

    functions = (getattr(placewright, name) for name in TORCH)
    return {
        name: (quietly(function), right)
        for name, function, right in zip(TORCH, functions, rights, strict=True)
    }


SKIPPED = {("placer", "function"), ("progress", "function"), ("devices", "None")}
"""The caller's own code may raise what it will; and without `devices` this machine is measured."""


def misuse(function, right):
    """Call with one wrong argument after the other; name those that give a raw exception."""
    function(**right)
    for name in right:
        for what, bad in BAD.items():
            if (name, what) in SKIPPED:
                continue
            try:
                function(**{**right, name: bad})
            except InputError:
                continue
            except TypeError as error:  # as Python says it of calls of a module
                if "argument" not in str(error) or name != "inputs":
                    yield f"{name}={what}: {type(error).__name__}: {error}"
            except Exception as error:  # which is what is looked for
                yield f"{name}={what}: {type(error).__name__}: {error}"


def test_a_wrong_argument_gives_an_answer_or_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [
        f"{name}: {words}"
        for name, (function, right) in calls(tmp_path).items()
        for words in misuse(function, right)
    ]
    assert not found, "\n".join(found)


def test_a_wrong_argument_about_a_module_gives_an_answer_or_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = [
        f"{name}: {words}"
        for name, (function, right) in calls_of_torch().items()
        for words in misuse(function, right)
    ]
    assert not found, "\n".join(found)


RECORDS = {"Batch", "Bounds", "Capture", "Coarse", "Measurement", "Result", "Step", "Timeline"}
RECORDS |= {"Transfers", "Op", "Output", "InputError", "Plan", "__version__"}
"""What is given back rather than made by hand, and records that are checked where they are used."""


def test_every_public_name_is_tried(tmp_path):
    tried = {*calls(tmp_path), *TORCH}
    assert {*placewright.__all__} - RECORDS <= tried
