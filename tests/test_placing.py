"""`place`, its evaluator, repair, contiguous splits and what is said about the answer."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from placewright.comparing import compare_placers
from placewright.errors import InputError
from placewright.evaluate import SimulatedEvaluator, step_load_s
from placewright.execute.expecting import ExpectedEvaluator
from placewright.graph import Graph
from placewright.graph_file import Op, Output
from placewright.grouping import layer_chunks
from placewright.load import load_model, load_problem
from placewright.placers.contiguous import contiguous_split
from placewright.placers.groups import Units
from placewright.placers.repair import repair, why_nothing_fits
from placewright.placers.run import Budget, Run
from placewright.placing import PLACERS, OneShot, place
from placewright.plan import Plan
from placewright.problem import Candidate, Problem
from placewright.simulator import simulate, simulate_many
from tests.test_placers import chain, cluster


def all_placements(problem):
    return np.array([*product(range(problem.num_devices), repeat=problem.num_ops)])


def random_problem(seed, num_ops, num_devices):
    random = np.random.default_rng(seed)
    ops = []
    for k in range(num_ops):
        inputs = [f"o{j}" for j in range(k) if random.random() < 0.35]
        size = int(random.integers(1, 4000))
        work = float(random.integers(1, 50)) * 1e5
        ops.append(Op(name=f"o{k}", inputs=inputs, flops=work, outputs=[size]))
    return Problem(Graph.build("r", ops), cluster(num_devices))


@pytest.mark.parametrize("seed", range(12))
def test_auto_finds_the_optimum_of_tiny_graphs(seed):
    problem = random_problem(seed, 7 + seed % 3, 2 + seed % 2)
    best = simulate_many(problem, all_placements(problem)).makespan_s.min()
    assert place(problem, "auto", budget="100000 samples").makespan_s == pytest.approx(best)


def test_the_load_of_a_step_is_worked_out_by_hand():
    # Three ops of 1 ms on a GPU, 1,000 bytes between them: 1 us of latency and 1 us of copying.
    problem = Problem(chain(3), cluster(3))
    op_s = problem.costs.op_ps[0, 1] / 1e12
    assert step_load_s(problem, [1, 1, 1]) == pytest.approx(3 * op_s)
    assert step_load_s(problem, [1, 2, 1]) == pytest.approx(2 * op_s)
    transfer_s = 2e-6
    assert step_load_s(problem, [1, 2, 1], overlap=False) == pytest.approx(
        2 * op_s + 2 * transfer_s
    )
    ops = [Op(name="a", outputs=[10**7]), Op(name="b", inputs=["a"], flops=1e6)]
    wide = Problem(Graph.build("wide", ops), cluster(3))
    assert step_load_s(wide, [1, 2]) == pytest.approx(1e-6 + 1e-2)  # the channel is the slowest


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_on_chains_the_split_is_the_best_contiguous_one_and_auto_the_optimum(seed, overlap):
    random = np.random.default_rng(seed)
    ops = [
        Op(
            name=f"o{k}",
            inputs=[f"o{k - 1}"] if k else [],
            flops=float(random.integers(1, 60)) * 1e5,
            outputs=[int(random.integers(1, 3000))],
        )
        for k in range(8)
    ]
    problem = Problem(Graph.build("chain", ops), cluster(3, ["cuda", "cuda", "cuda"]))
    rows = all_placements(problem)
    loads = [step_load_s(problem, row, overlap) for row in rows]
    is_contiguous = [len(set(row)) == 1 + np.count_nonzero(np.diff(row)) for row in rows]
    least = min(load for load, is_one in zip(loads, is_contiguous, strict=True) if is_one)
    found = contiguous_split(problem, "throughput", overlap=overlap)
    assert step_load_s(problem, found, overlap) == pytest.approx(least)
    result = place(problem, "auto", objective="throughput", overlap=overlap, budget="7000 samples")
    assert result.objective_s == pytest.approx(min(loads))


def test_throughput_is_never_worse_than_the_best_contiguous_split():
    for model, testbed in (("tiny-gpt2", "k40x4"), ("tiny-nmt", "k40x2")):
        problem = load_problem(load_model(model), testbed)
        split = contiguous_split(problem, "throughput")
        result = place(problem, "auto", objective="throughput", budget="1000 samples")
        assert result.objective_s <= step_load_s(problem, split)
        assert result.objective_s >= result.lower_bound_s


def test_evaluators_count_samples_and_compare_feasibility_first():
    problem = load_problem(load_model("tiny-gpt2"), "k40x2-tight")
    evaluator = SimulatedEvaluator(problem)
    rows = [np.full(problem.num_ops, d) for d in range(3)]
    found = evaluator.evaluate([Candidate(row) for row in rows])
    assert evaluator.num_samples == 3
    assert found.best == 0  # the slow CPU fits, the GPUs do not
    assert found.overflow_bytes[1] > 0
    ordered = evaluator.evaluate([Candidate(rows[0], "program"), Candidate(rows[1], "program")])
    assert ordered.objective_s[0] == simulate(problem, Candidate(rows[0], "program")).makespan_s


def test_repair_makes_a_placement_fit():
    problem = load_problem(load_model("tiny-llama"), "k40x4-tight")
    run = Run(problem, SimulatedEvaluator(problem))
    fixed = repair(run, np.full(problem.num_ops, 1))
    assert simulate(problem, fixed).is_feasible
    assert run.key[0] == 0


@pytest.mark.parametrize("name", ["auto", "annealing", "cross-entropy", "hill-climbing"])
def test_searches_find_the_only_device_that_fits(name):
    problem = load_problem(load_model("tiny-nmt"), "k40x2", "1KiB")
    assert place(problem, name, budget="100 samples").is_feasible


def test_in_a_small_graph_weights_can_stay_where_their_ops_do_not_run():
    # 40 layers: 1 ms on the GPU, 10 ms on the CPU, 0.1 ms to copy a weight. 32 weights fit the GPU.
    ops = []
    for k in range(40):
        module = f"layers.{k}"
        weight = Output(100_000, persistent=True)
        ops.append(Op(name=f"w{k}", kind="param", outputs=[weight], module=module))
        inputs = [f"w{k}", *([f"op{k - 1}"] if k else [])]
        ops.append(Op(name=f"op{k}", inputs=inputs, flops=1e7, outputs=[100], module=module))
    box = replace(cluster(2), memory_bytes=np.array([10**9, 3_250_000]))
    problem = Problem(Graph.build("layers", ops), box)
    streamed = np.ones(problem.num_ops, dtype=np.int64)
    streamed[-20::2] = 0  # the weights of the last ten layers
    by_hand = simulate(problem, streamed)
    assert by_hand.is_feasible
    assert place(problem, "contiguous").makespan_s > 2 * by_hand.makespan_s
    for seed in range(3):
        found = place(problem, "auto", budget="4000 samples", seed=seed)
        assert found.makespan_s <= 1.01 * by_hand.makespan_s


def test_what_cannot_fit_is_proven():
    weights = [
        Op(name=f"w{k}", kind="param", outputs=[Output(600, persistent=True)]) for k in range(4)
    ]
    problem = Problem(Graph.build("large", weights), cluster(2, memory=1000))
    assert "takes 2.34 KiB, and all devices together have 1.95 KiB" in why_nothing_fits(problem)
    result = place(problem, "auto", budget="50 samples")
    assert not result.is_feasible
    assert result.reason.startswith("Nothing fits: What stays in memory")
    one = Problem(Graph.build("op", [Op(name="big", outputs=[5000])]), cluster(2, memory=1000))
    assert "Op `big` makes 4.88 KiB at once" in why_nothing_fits(one)
    assert why_nothing_fits(Problem(chain(3), cluster(2))) is None


def test_a_run_can_be_saved_and_its_plan_simulated(tmp_path):
    problem = load_problem(load_model("tiny-gpt2"), "k40x2")
    result = place(problem, "annealing", budget="200 samples", seed=3)
    result.save(tmp_path / "run")
    plan = Plan.load(tmp_path / "run" / "plan.json")
    assert simulate(problem, plan.candidate(problem)).makespan_s == result.makespan_s
    history = [
        json.loads(line)
        for line in (tmp_path / "run/history.jsonl").read_text().split("\n")
        if line
    ]
    assert history[-1]["objective_s"] == result.objective_s
    assert [h["objective_s"] for h in history] == sorted(
        (h["objective_s"] for h in history), reverse=True
    )
    assert (tmp_path / "run" / "timeline.json").exists()
    facts = result.describe()
    assert {"makespan_s", "is_feasible", "lower_bound_s", "placer", "samples", "wall_s"} <= {*facts}


def test_an_interrupt_gives_the_best_so_far():
    problem = load_problem(load_model("tiny-gpt2"), "k40x2")

    def interrupted(run):
        run.offer([np.zeros(problem.num_ops, dtype=np.int64)])
        raise KeyboardInterrupt

    result = place(problem, interrupted)
    assert set(result.placement) == {0}


def test_groupings_can_be_used_by_every_kind_of_placer():
    problem = load_problem(load_model("tiny-gpt2"), "k40x2")
    for name in ("heft", "annealing", "cross-entropy"):
        for grouping in ("colocated", "sole-consumer", "by-module", np.arange(problem.num_ops)):
            result = place(problem, name, budget="60 samples", grouping=grouping)
            problem.check(result.placement)
    together = place(
        problem, "random", budget="60 samples", grouping=np.zeros(problem.num_ops, int)
    )
    assert len(set(together.placement)) == 1
    with pytest.raises(InputError, match="no grouping `nothing`"):
        place(problem, "heft", grouping="nothing")


def test_units_tell_placements_and_read_them_back():
    problem = load_problem(load_model("tiny-nmt"), "k40x4")
    random = np.random.default_rng(0)
    units = Units.of(problem, layer_chunks(problem, 40))
    devices = random.integers(0, problem.num_devices, units.num_groups)
    placement = units.expand(devices)
    problem.check(placement)
    assert np.array_equal(units.read(placement), devices)
    scattered = random.integers(0, problem.num_devices, problem.num_ops)
    scattered[problem.colocation_members] = scattered[problem.colocation_leaders]
    around = Units.around(problem, layer_chunks(problem, 40), scattered)
    assert np.array_equal(around.expand(around.read(scattered)), scattered)


def test_progress_tells_best_gap_and_speed():
    import io

    from rich.console import Console

    from placewright.report import live

    problem = load_problem(load_model("tiny-gpt2"), "k40x2")
    for is_terminal in (True, False):
        stream = io.StringIO()
        console = Console(file=stream, force_terminal=is_terminal, width=120)
        shown = live.Live(1e-4, console)
        shown._said_s = -100.0  # long ago
        place(problem, "random", budget="20 samples", progress=shown)
        shown.close()
        for words in ("best ", "gap ", "samples/s", "random"):
            assert words in stream.getvalue()


def test_unknown_placers_are_told_the_known_ones():
    problem = Problem(chain(3), cluster(2))
    with pytest.raises(InputError, match=r"no placer `magic`\. There are: auto"):
        place(problem, "magic")


def test_the_clock_begins_once_the_placer_is_prepared():
    class Slow(OneShot):
        def prepare(self, problem):
            prepared.append(problem)
            time.sleep(0.5)

    prepared = []
    problem = Problem(chain(3), cluster(2))
    mine = Slow(lambda problem, run: np.zeros(problem.num_ops, dtype=np.int64))
    assert place(problem, mine, budget="0.4s").wall_s < 0.4
    assert prepared == [problem]
    with pytest.raises(InputError, match="`seed` is -1"):  # what is wrong is told before
        place(problem, mine, seed=-1)
    assert len(prepared) == 1


def test_a_placer_of_ones_own_is_a_function_of_a_run():
    problem = Problem(chain(3), cluster(2))
    mine = OneShot(lambda problem, run: np.zeros(problem.num_ops, dtype=np.int64))
    assert place(problem, mine).placer == "OneShot"
    assert place(problem, PLACERS["heft"], budget=Budget(samples=1)).is_feasible


def offers_nothing(run):
    """Run a placer that is over at once."""


def test_a_placer_that_offers_nothing_is_named():
    problem = random_problem(0, 4, 2)
    with pytest.raises(InputError, match="Placer `offers_nothing` offers no placement"):
        place(problem, offers_nothing)
    with pytest.raises(InputError, match="offers an empty list"):
        place(problem, lambda run: run.offer([]))


def test_ctrl_c_before_there_is_an_answer_is_not_one():
    def interrupted(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        place(random_problem(0, 4, 2), interrupted)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"objective": "troughput"}, "expected latency or throughput. Is it `throughput`"),
        ({"objective": None}, "`objective` is None; expected latency or throughput"),
        ({"budget_s": float("nan")}, "`budget_s` is nan; expected a finite number, at least 0"),
        ({"budget_s": float("inf")}, "`budget_s` is inf"),
        ({"budget_s": -1}, "`budget_s` is -1"),
        ({"budget_s": "soon"}, "is 'soon'; expected a number"),
        ({"budget": "9" * 5000 + " samples"}, "`budget` is '9999.*expected text such as `60s`"),
        ({"budget": "9" * 90 + " samples"}, "`samples` is 9999.*expected a whole number"),
        ({"budget": "1e99 s"}, "`seconds` is 1e.99"),
        ({"seed": 1.5}, "`seed` is 1.5; expected a whole number"),
        ({"placer": object()}, "`placer` is <object.*expected a placer's name"),
        ({"grouping": [0, 1]}, r"`grouping` has shape \(2,\)"),
        ({"evaluator": "simulated"}, "`evaluator` is 'simulated'; expected an evaluator"),
        ({"folder": 3}, "`folder` is 3; expected a path"),
        ({"options": "x"}, "`options` is 'x'; expected a mapping"),
        ({"progress": "yes"}, "`progress` is 'yes'; expected a function"),
    ],
)
def test_wrong_arguments_of_place_are_named(fields, words):
    problem = random_problem(0, 4, 2)
    with pytest.raises(InputError, match=words):
        place(problem, **{"placer": "auto", "budget_s": None} | fields)


def test_groups_may_have_any_numbers():
    problem = random_problem(0, 4, 2)
    few, many = (
        place(problem, "random", budget="20 samples", grouping=grouping).placement.tolist()
        for grouping in ([0, 1, 1, 0], [-5, 2**60, 2**60, -5])
    )
    assert few == many


def test_evaluators_refuse_an_unknown_objective():
    for make in (SimulatedEvaluator, ExpectedEvaluator):
        with pytest.raises(InputError, match="Is it `latency` that is meant"):
            make(random_problem(0, 4, 2), objective="latancy")


def test_comparing_refuses_a_wrong_budget_or_objective_at_once():
    problem = random_problem(0, 4, 2)
    for fields in ({"budget": "soon"}, {"objective": "troughput"}, {"num_seeds": 0}):
        with pytest.raises(InputError):
            compare_placers(problem, ["heft"], **fields)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1, -1.0, "1", True])
def test_budgets_are_finite_and_not_negative(wrong):
    for name in ("seconds", "samples", "idle_seconds"):
        with pytest.raises(InputError, match=f"`{name}` is {wrong!r}; expected"):
            Budget(**{name: wrong})
