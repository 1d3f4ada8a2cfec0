"""A plan at shapes that it was not made for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import placewright as pw
from placewright.cli import app
from placewright.errors import InputError

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.random_module_cases import box, make_plan  # noqa: E402


class Unrolled(nn.Module):
    """As many steps of one cell as its input is long."""

    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        state = x[:, 0]
        for step in x.unbind(1):
            state = self.cell(state + step).tanh()
        return self.out(state)


def graph_of(length, rows=4):
    return pw.capture(Unrolled(), torch.randn(rows, length, 8)).graph


def test_the_same_shapes_keep_placement_and_order():
    graph = graph_of(3)
    plan = make_plan(graph, 1)
    problem = pw.Problem(graph, box())
    carried = pw.carry_over(plan, graph, problem)
    assert np.array_equal(carried.placement, plan.candidate(problem).placement)
    started = [graph.op_index[name] for name in plan.sequence if isinstance(name, str)]
    assert np.all(np.diff(carried.priorities[started]) < 0)


def test_a_larger_batch_keeps_every_device_and_takes_longer():
    plan = make_plan(graph_of(3), 1)
    problem = pw.Problem(graph_of(3, rows=4000), box())
    carried = pw.carry_over(plan, graph_of(3), problem)
    names = problem.graph.op_names
    assert {
        n: box().device_names[d] for n, d in zip(names, carried.placement, strict=True)
    } == plan.devices
    assert pw.simulate(problem, carried).makespan_s > plan.predicted.makespan_s


def test_more_steps_run_where_their_module_does():
    graph = graph_of(2)
    plan = make_plan(graph, -1)
    for name in plan.devices:
        plan.devices[name] = "cpu:1" if name.startswith("cell") else "cpu:0"
    longer = graph_of(5)
    carried = pw.carry_over(plan, graph, pw.Problem(longer, box()))
    for module, device in zip(longer.op_modules, carried.placement, strict=True):
        if module:
            assert device == (module == "cell")


def test_a_plan_of_another_graph_is_refused():
    with pytest.raises(InputError, match="has another fingerprint"):
        pw.carry_over(make_plan(graph_of(2), 1), graph_of(3), pw.Problem(graph_of(4), box()))


MODEL = """
import torch
from torch import nn
def build(rows=4):
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(rows, 8)
def large():
    return build(4000)
"""


def test_the_command_line_simulates_a_plan_at_another_shape(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text(MODEL)

    def run(*words):
        return CliRunner().invoke(app, [*words])

    given = ["--cluster", "laptop", "--json"]
    build, large = ("simulate", "m.py:build", *given), ("simulate", "m.py:large", *given)
    assert run(*build, "--on", "cpu", "--save", "p.json").exit_code == 0
    found = run(*large, "--plan", "p.json")
    assert found.exit_code == 2
    assert "was made for graph" in found.stderr
    found = run(*large, "--plan", "p.json", "--made-for", "m.py:build")
    assert found.exit_code == 0
    assert json.loads(found.stdout)["makespan_s"] > 0
    found = run(*large, "--on", "cpu", "--made-for", "m.py:build")
    assert found.exit_code == 2
    assert "give it with `--plan`" in found.stderr
