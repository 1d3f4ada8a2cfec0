from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewright.errors import InputError
from placewright.plan import Plan, load_plan_or_placement, placement_by_name
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate

from . import tiny, worlds
from .test_kernel import cases


def plan_of(timeline, **changes):
    return Plan.of(timeline, "mine", lower_bound_s=1e-12, placer="by hand", **changes)


@given(cases())
@settings(max_examples=100, deadline=None)
def test_a_saved_plan_gives_its_candidate_back(tmp_path_factory, case):
    problem, *candidate = case
    timeline = simulate(problem, Candidate(*candidate))
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    plan_of(timeline, seed=3, budget="60s").save(path)
    loaded = Plan.load(path)
    assert loaded.origin.seed == 3
    again = simulate(problem, loaded.candidate(problem))
    assert again.op_start_ps.tolist() == timeline.op_start_ps.tolist()
    assert again.makespan_s == loaded.predicted.makespan_s
    assert again.triggers == timeline.triggers


def test_a_plan_is_readable():
    plan = plan_of(simulate(tiny.chain(), [0, 1, 0]))
    assert plan.devices == {"a": "cuda:0", "b": "cuda:1", "c": "cuda:0"}
    assert plan.sequence == ["a", ("a", "cuda:1"), "b", ("b", "cuda:0"), "c"]
    assert plan.predicted.makespan_s == 42e-12
    assert plan.predicted.peak_bytes == {"cuda:0": 10, "cuda:1": 10}
    assert plan.predicted.is_feasible
    assert "placewright" in plan.origin.versions


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_start_sequence_never_needs_what_is_behind_it(data):
    problem = data.draw(worlds.problems())
    graph = problem.graph
    placement = data.draw(worlds.placements(problem))
    timeline = simulate(problem, placement)
    have = {  # (tensor, device) that is there or on its way
        (t, int(placement[graph.tensor_op[t]]))
        for t in range(graph.num_tensors)
        if graph.op_is_resident[graph.tensor_op[t]]
    }
    for started in timeline.sequence.tolist():
        if started >= problem.num_ops:
            n = started - problem.num_ops
            tensor = int(timeline.transfers.tensor[n])
            assert (tensor, int(timeline.transfers.source[n])) in have
            have.add((tensor, int(timeline.transfers.target[n])))
        else:
            reads = graph.use_tensor[graph.use_op == started]
            assert all((int(t), int(placement[started])) in have for t in reads)
            made = range(int(graph.op_outputs[started]), int(graph.op_outputs[started + 1]))
            have |= {(t, int(placement[started])) for t in made}


def test_a_plan_for_another_graph_or_cluster_is_refused():
    plan = plan_of(simulate(tiny.chain(), [0, 1, 0]))
    with pytest.raises(InputError, match=r"was made for graph `tiny` .* not for `tiny`"):
        plan.candidate(tiny.diamond())
    other = Problem(tiny.chain().graph, worlds.make_cluster(("cuda",) * 3))
    with pytest.raises(InputError, match="was made for cluster `world`"):
        plan.candidate(other)
    slower = dataclasses.replace(tiny.chain(), cluster=worlds.make_cluster(bytes_per_ps=0.1))
    assert plan.candidate(slower).placement.tolist() == [0, 1, 0]


def test_a_plan_that_names_unknown_things_is_refused(tmp_path):
    plan = plan_of(simulate(tiny.streamed(), [0, 1, 0, 1, 0, 1, 0], triggers={(5, 0): 4}))
    path = tmp_path / "plan.json"
    plan.save(path)
    content = json.loads(path.read_text())
    for change, words in (
        ({"devices": content["devices"] | {"f0": "tpu:0"}}, "has no device `tpu:0`"),
        ({"devices": content["devices"] | {"f9": "cuda:0"}}, "names op `f9`"),
        ({"devices": {"f0": "cuda:0"}}, "has 1 entries and none for op `x`; expected 7"),
        ({"triggers": [{"tensor": "w9", "device": "cuda:0", "after": None}]}, "names tensor `w9`"),
        ({"triggers": [{"tensor": "w2", "device": "cuda:0", "after": "f9"}]}, "names op `f9`"),
        ({"discipline": "priority", "priorities": {"x": 1}}, "is only in the graph"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(InputError) as caught:
            Plan.load(path).candidate(tiny.streamed())
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not a plan file"),
        ("{}", "expected 'placewright-plan', version 1"),
        ('{"format": "placewright-plan", "version": 1, "x": 2}', "is wrong: object "),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, text, words):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError, match=words):
        Plan.load(path)


def test_a_plan_of_a_later_version_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    plan_of(simulate(tiny.chain(), [0, 1, 0])).save(path)
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(InputError, match="version 2; expected 'placewright-plan', version 1"):
        Plan.load(path)


def test_a_bare_placement_is_an_object(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('{"c": "cuda:0", "b": "cuda:1", "a": "cuda:0"}')
    loaded = load_plan_or_placement(path)
    assert placement_by_name(tiny.chain(), loaded) == [0, 1, 0]
    plan_of(simulate(tiny.chain(), [0, 1, 0])).save(path)
    assert isinstance(load_plan_or_placement(path), Plan)
    for text in ('["cuda:0"]', "oops", "7", '{"a": 0}'):
        path.write_text(text)
        with pytest.raises(InputError, match=r"p\.json"):
            load_plan_or_placement(path)
    with pytest.raises(InputError, match="has 1 entries and none for op `b`"):
        placement_by_name(tiny.chain(), {"a": "cuda:0"})
    with pytest.raises(InputError, match="no device `tpu`"):
        placement_by_name(tiny.chain(), {"a": "tpu", "b": "tpu", "c": "tpu"})
