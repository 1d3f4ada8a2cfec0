from __future__ import annotations

import json
import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from placewright.bench import fidelity, fidelity_deals, fidelity_fit
from placewright.bench.fidelity import (
    LARGE,
    MODELS,
    QUICK_MODELS,
    FidelityChoice,
    _is_settled,
    runnable,
)
from placewright.bench.fidelity_book import FidelityBook, Record, to_placement, to_text
from placewright.bench.fidelity_deals import make_deals
from placewright.bench.fidelity_fit import (
    Sample,
    agreement,
    calibrate,
    covered,
    fit_constants,
    peak_error,
    reachable_spearman,
)
from placewright.bench.fidelity_plans import _choose, draw_plans
from placewright.bench.fidelity_tables import make_panels, make_tables, read_fidelity
from placewright.cli import app
from placewright.cli.fidelity import _keep
from placewright.cluster import Cluster
from placewright.comparing import compare_placers, describe_chances
from placewright.costs import Costs
from placewright.errors import InputError
from placewright.execute import calibration as calibrating
from placewright.execute.calibration import (
    Calibration,
    conformal_ends,
    interval,
    predict,
    probability_faster,
    save_calibration,
)
from placewright.execute.expecting import ExpectedEvaluator
from placewright.execute.measuring import Measurement
from placewright.execute.op_times import (
    Times,
    Timing,
    add_times,
    device_keys,
    op_signatures,
    processor_model,
    torch_version,
)
from placewright.execute.replay import Constants, KindConstants, Replay
from placewright.execute.replayed_peaks import replayed_peaks
from placewright.graph_file import Op, Output
from placewright.load import load_model
from placewright.placing import place
from placewright.problem import Candidate, Problem
from placewright.report.scatter import Panel, draw_scatter
from placewright.simulator import simulate

from . import tiny
from .test_measuring import BOX
from .worlds import make_cluster

PS = 1e-12


def cores(num_devices=2):
    """CPU devices of a picosecond a byte and a latency of 1 ps."""
    return make_cluster(("cpu",) * num_devices)


def real_problem(model="tiny-gpt2", seed=0):
    """A captured model on two cores of real size, its op times made up: GPT-2's are longer."""
    cluster = make_cluster(("cpu", "cpu"), latency_ps=5e6, bytes_per_ps=5e-3, memory=2**40)
    graph = load_model(model)
    works = (graph.op_flops > 0) | (graph.op_bytes > 0)
    times_s = np.exp(np.random.default_rng(seed).uniform(np.log(1), np.log(20), len(works)))
    times_s *= 100e-6 if "gpt2" in model else 10e-6
    op_ps = np.where(works, times_s * 1e12, 0).astype(np.int64)
    gain_ps = op_ps * (1 + np.arange(len(op_ps)) % 3) // 10  # 10 % to 30 %
    costs = Costs(np.stack([op_ps, op_ps], axis=1), idle_gain_ps=np.stack([gain_ps] * 2, axis=1))
    return Problem(graph, cluster, costs)


def made_up(residuals=(-0.1, 0.0, 0.1), **more):
    fields = {"constants": Constants(), "within_sd": 0.05, "between_sd": 0.02, "num_models": 1}
    given = tuple(sorted(residuals))
    return Calibration(devices=("a core",), torch="2", residuals=given, **{**fields, **more})


def planted(seed=0):
    """Constants, and plans measured by a machine that has just these."""
    constants = Constants(
        kinds={"cpu": KindConstants(1.2, 15e-6)},
        transfer_overhead_s=60e-6,
        weights_overhead_s=10e-6,
        copy_factor=1.5,
        weights_factor=1.7,
        cached_factor=0.8,
        step_overhead_s=200e-6,
        wake_factor=2.0,
        idle_factor=0.5,
    )
    samples = []
    for model in ("tiny-gpt2", "tiny-nmt"):
        problem = real_problem(model, seed)
        for plan in draw_plans(problem, 12, seed):
            replay = Replay.of(simulate(problem, Candidate(plan.placement)))
            samples.append(Sample(model, replay, replay.time_s(constants)))
    return constants, samples


# Replays.


def diamond_on_cores():
    ops = [
        Op(name="a", outputs=[4]),
        Op(name="b", inputs=["a"], outputs=[2]),
        Op(name="c", inputs=["a"], outputs=[6]),
        Op(name="d", inputs=["b", "c"], outputs=[Output(1, keep=True)]),
    ]
    return tiny.problem(ops, {"a": 10, "b": 20, "c": 5, "d": 7}, cores())


def test_on_one_device_a_replay_takes_as_long_as_its_ops():
    problem = diamond_on_cores()
    assert predict(problem, Candidate([0, 0, 0, 0]), made_up()) == pytest.approx(42 * PS)


def test_a_receiving_core_copies_before_it_goes_on():
    # cpu:1 wakes at 11, copies `a` until 15 and runs c until 20; cpu:0 runs b until 30, finds c's
    # tensor there, copies it until 36, and runs d until 43. The simulator copies meanwhile: 37.
    problem, candidate = diamond_on_cores(), Candidate([0, 0, 1, 0])
    assert simulate(problem, candidate).makespan_s == pytest.approx(37 * PS)
    assert predict(problem, candidate, made_up()) == pytest.approx(43 * PS)


@pytest.mark.parametrize(("op", "less"), [(20, 4), (6, 3)])
def test_what_reads_a_weight_that_was_just_copied_takes_less(op, less):
    # 8 bytes are copied; half of that is gained, or half of the op's time if it is less.
    ops = [
        Op(name="w", outputs=[Output(8, persistent=True)]),
        Op(name="a", inputs=["w"], outputs=[Output(1, keep=True)]),
    ]
    problem, found = tiny.problem(ops, {"a": op}, cores()), Constants(cached_factor=0.5)
    apart = predict(problem, Candidate([0, 1]), made_up(constants=found))
    assert apart == pytest.approx((8 + op - less) * PS)
    assert predict(problem, Candidate([1, 1]), made_up(constants=found)) == pytest.approx(op * PS)
    large = tiny.problem(ops, {"a": 100}, cores())  # a copy never pays
    free = made_up(constants=Constants(cached_factor=3.0))
    assert predict(large, Candidate([0, 1]), free) == pytest.approx(100 * PS)
    made = [Op(name="w", outputs=[8]), ops[1]]  # what was made in this step is in a cache anyway
    problem = tiny.problem(made, {"w": 1, "a": op}, cores())
    apart = predict(problem, Candidate([0, 1]), made_up(constants=found))
    assert apart == pytest.approx((1 + 1 + 8 + op) * PS)


def test_copies_to_a_gpu_go_on_beside_computing():
    problem, candidate = diamond_on_cores(), Candidate([0, 0, 1, 0])
    mixed = Problem(problem.graph, make_cluster(("cuda", "cuda")), problem.costs)
    assert predict(mixed, candidate, made_up()) == pytest.approx(37 * PS)


def test_a_cpu_prepares_what_it_sends_to_a_gpu():
    # `a` takes 10, its 4 bytes 4 times 2 more; then cuda runs c from 1 + 4 after that, while the
    # CPU runs b from 18 on; what comes back is not prepared by anyone.
    problem, candidate = diamond_on_cores(), Candidate([0, 0, 1, 0])
    mixed = Problem(problem.graph, make_cluster(("cpu", "cuda")), problem.costs)
    found = made_up(constants=Constants(staging_factor=2.0))
    assert predict(mixed, candidate, found) == pytest.approx((18 + 20 + 7) * PS)


def test_a_thread_takes_time_for_every_tensor_between_a_cpu_and_a_gpu():
    # The CPU makes `a` until 10 and hands it over until 13; b until 33. The GPU's thread has it at
    # 16; it arrives at 16 + 1 + 4 = 21, c until 26; what is sent then, from 26 on, is there at 33;
    # the CPU takes it until 36, and d runs until 43.
    problem, candidate = diamond_on_cores(), Candidate([0, 0, 1, 0])
    mixed = Problem(problem.graph, make_cluster(("cpu", "cuda")), problem.costs)
    found = made_up(constants=Constants(hand_over_s=3 * PS))
    assert predict(mixed, candidate, found) == pytest.approx(43 * PS)


@pytest.mark.parametrize(("size", "until", "slow_until"), [(4, 20, 20), (40, 41, 44)])
def test_a_gpu_lends_a_parameter_ahead(size, until, slow_until):
    # The CPU runs `a` until 20. By then it has the weight, or waits for it until 1 + 40; to take it
    # over takes it 3, and the GPU's thread as long, before it begins to copy.
    ops = [
        Op(name="w", outputs=[Output(size, persistent=True)]),
        Op(name="a", outputs=[Output(1, keep=True)]),
        Op(name="b", inputs=["w"], outputs=[Output(1, keep=True)]),
    ]
    problem = tiny.problem(ops, {"a": 20, "b": 10}, make_cluster(("cuda", "cpu")))
    found = predict(problem, Candidate([0, 1, 1]), made_up())
    assert found == pytest.approx((until + 10) * PS)
    slow = made_up(constants=Constants(hand_over_s=3 * PS))
    found = predict(problem, Candidate([0, 1, 1]), slow)
    assert found == pytest.approx((slow_until + 3 + 10) * PS)


@pytest.mark.parametrize(("size", "until"), [(4, 14), (40, 43)])
def test_what_arrives_at_a_gpu_waits_for_parameters_on_their_way(size, until):
    # What the CPU has made by 10 comes 1 + 3 later, or, if the weight's 40 go first, 3 after them.
    ops = [
        Op(name="w", outputs=[Output(size, persistent=True)]),
        Op(name="a", outputs=[3]),
        Op(name="b", inputs=["a"], outputs=[Output(1, keep=True)]),
        Op(name="c", inputs=["b", "w"], outputs=[Output(1, keep=True)]),
    ]
    problem = tiny.problem(ops, {"a": 10, "b": 5, "c": 2}, make_cluster(("cpu", "cuda")))
    found = predict(problem, Candidate([0, 0, 1, 1]), made_up())
    assert found == pytest.approx((until + 5 + 2) * PS)


def test_a_link_to_a_gpu_has_no_latency_while_that_computes():
    # The CPU makes `a` and `b` until 2. Both come once the GPU has computed its own, until 30.
    ops = [
        Op(name="own", outputs=[Output(1, keep=True)]),
        Op(name="a", outputs=[3]),
        Op(name="b", outputs=[4]),
        Op(name="c", inputs=["a", "b"], outputs=[Output(1, keep=True)]),
    ]
    times = {"own": 30, "a": 1, "b": 1, "c": 2}
    problem = tiny.problem(ops, times, make_cluster(("cpu", "cuda")))
    found = predict(problem, Candidate([1, 0, 0, 1]), made_up())
    assert found == pytest.approx((30 + 3 + 4 + 2) * PS)


def test_tensors_follow_each_other_from_a_gpu():
    # The GPU makes `a` until 1 and `b` until 2; 10 and 4 bytes later, and 1, both are there.
    ops = [
        Op(name="a", outputs=[10]),
        Op(name="b", outputs=[4]),
        Op(name="c", inputs=["a", "b"], outputs=[Output(1, keep=True)]),
    ]
    problem = tiny.problem(ops, {"a": 1, "b": 1, "c": 2}, make_cluster(("cuda", "cpu")))
    found = predict(problem, Candidate([0, 0, 1]), made_up())
    assert found == pytest.approx((1 + 10 + 4 + 1 + 2) * PS)


def test_a_signal_does_not_wait_for_copies():
    # `a` leaves from 1 on until 1 + 1 + 40; b, after it, only tells c to begin, at 1 + 20.
    ops = [
        Op(name="a", outputs=[40]),
        Op(name="b", outputs=[0]),
        Op(name="c", inputs=["b"], outputs=[Output(1, keep=True)]),
        Op(name="d", inputs=["a"], outputs=[Output(1, keep=True)]),
    ]
    times = {"a": 1, "b": 20, "c": 30, "d": 1}
    problem = tiny.problem(ops, times, make_cluster(("cuda", "cpu")))
    assert predict(problem, Candidate([0, 0, 1, 1]), made_up()) == pytest.approx(52 * PS)


def test_a_gpu_begins_nothing_before_it_was_issued():
    # `a` is the GPU's; sending it takes its thread until 10, and only then is b issued.
    ops = [
        Op(name="a", outputs=[4]),
        Op(name="b", outputs=[Output(1, keep=True)]),
        Op(name="c", inputs=["a"], outputs=[Output(1, keep=True)]),
    ]
    problem = tiny.problem(ops, {"a": 1, "b": 20, "c": 2}, make_cluster(("cuda", "cpu")))
    found = made_up(constants=Constants(hand_over_s=10 * PS))
    assert predict(problem, Candidate([0, 0, 1]), found) == pytest.approx(30 * PS)


def test_constants_count_once_for_each_op_transfer_and_step():
    problem, candidate = diamond_on_cores(), Candidate([0, 0, 1, 0])
    constants = Constants(
        kinds={"cpu": KindConstants(2.0, 1 * PS)},
        transfer_overhead_s=3 * PS,
        copy_factor=10.0,
        step_overhead_s=100 * PS,
        wake_factor=2.0,
    )
    # a until 21; cpu:1 wakes at 23 and copies `a` (3 + 40) until 66, c until 77; b until 62; cpu:0
    # wakes at 79 and copies c's tensor (3 + 60) until 142; d until 157; the step's 100.
    found = predict(problem, candidate, made_up(constants=constants))
    assert found == pytest.approx(257 * PS)


def test_ops_are_quicker_while_other_cores_idle():
    def gaining(problem, *gain_ps):
        gains = np.stack([np.array(gain_ps)] * problem.num_devices, axis=1)
        return replace(problem, costs=replace(problem.costs, idle_gain_ps=gains))

    found = made_up()
    problem = gaining(diamond_on_cores(), 1, 2, 0, 3)
    assert predict(problem, Candidate([0, 0, 0, 0]), found) == pytest.approx((42 - 6) * PS)
    half = made_up(constants=Constants(idle_factor=0.5))
    assert predict(problem, Candidate([0, 0, 0, 0]), half) == pytest.approx((42 - 3) * PS)
    both = tiny.problem([Op(name="a"), Op(name="b")], {"a": 10, "b": 10}, cores())
    assert predict(gaining(both, 5, 5), Candidate([0, 1]), found) == pytest.approx(10 * PS)
    # While `a` runs for 20, the other core works for 10 of them: half of the gain.
    uneven = tiny.problem([Op(name="a"), Op(name="b")], {"a": 20, "b": 10}, cores())
    assert predict(gaining(uneven, 4, 0), Candidate([0, 1]), found) == pytest.approx(18 * PS)
    gpus = Problem(problem.graph, make_cluster(("cuda", "cuda")), problem.costs)
    assert predict(gpus, Candidate([0, 0, 0, 0]), found) == pytest.approx(42 * PS)


def test_a_processor_beside_a_gpu_is_quicker_if_nothing_is_on_that():
    problem, gains = diamond_on_cores(), np.array([[1, 0], [2, 0], [0, 0], [3, 0]])
    mixed = Problem(problem.graph, make_cluster(("cpu", "cuda")), problem.costs)
    gaining = replace(mixed, costs=replace(problem.costs, idle_gain_ps=gains))
    for placement, gain in (([0, 0, 0, 0], 6), ([0, 0, 1, 0], 0), ([1, 1, 1, 0], 0)):
        before, after = (predict(p, Candidate(placement), made_up()) for p in (mixed, gaining))
        assert before - after == pytest.approx(gain * PS)


@pytest.mark.parametrize("seed", range(3))
def test_a_replay_lasts_no_less_than_its_busiest_device(seed):
    problem = real_problem(seed=seed)
    for plan in draw_plans(problem, 10, seed):
        replay = Replay.of(simulate(problem, Candidate(plan.placement)))
        most_s = replay.total_work[:, 0].max()
        assert replay.time_s(Constants(idle_factor=0.0)) >= most_s * (1 - 1e-12)
        assert replay.time_s(Constants()) >= 0.7 * most_s * (1 - 1e-12)


@pytest.mark.parametrize("model", ["tiny-gpt2", "tiny-resnet"])
def test_on_one_device_replayed_peaks_are_the_simulated_ones(model):
    problem = real_problem(model)
    for d in range(2):
        timeline = simulate(problem, np.full(problem.num_ops, d))
        assert replayed_peaks(timeline).tolist() == timeline.peak_bytes.tolist()


def test_noise_limits_how_well_an_order_can_be_predicted():
    times_s = np.linspace(1.0, 1.2, 20)
    reached = [reachable_spearman(times_s, noise_sd) for noise_sd in (0.0, 0.01, 0.1)]
    assert reached[0] == 1.0
    assert 0.95 < reached[1] < 1.0
    assert reached[2] < 0.7
    assert reachable_spearman([1.0, 2.0], 0.1) is None


def test_plans_that_take_nearly_the_same_run_in_more_processes():
    random = np.random.default_rng(1)

    def measured(spread, count):
        """Times of 20 plans that vary by 3 %, and of one that failed."""
        true_s = np.linspace(1.0, 1.0 + spread, 20)[:, None] * np.linspace(0.9, 1.1, count)
        times_s = true_s * np.exp(random.normal(0.0, 0.03, (20, count)))
        found = {
            f"plan {k}": [Measurement(name="", rounds=(np.array([each]),)) for each in row]
            for k, row in enumerate(times_s.tolist())
        }
        return found | {"failed": [Measurement(name="", failure="memory")] * count}

    assert not _is_settled(measured(0.1, 3))
    assert _is_settled(measured(0.1, 40))
    assert _is_settled(measured(3.0, 3))
    assert _is_settled({"failed": measured(0.1, 3)["failed"]})  # no more is to be learned


def test_a_gpu_has_what_it_receives_from_its_first_reader_on():
    ops = [
        Op(name="a", outputs=[50]),
        Op(name="b", outputs=[30]),
        Op(name="c", inputs=["b"], outputs=[Output(1, keep=True)]),
        Op(name="d", inputs=["a", "c"], outputs=[Output(1, keep=True)]),
        Op(name="e", inputs=["a"], outputs=[Output(1, keep=True)]),
    ]
    times = {"a": 10, "b": 200, "c": 10, "d": 10, "e": 10}
    # The GPU is busy with b until 200, and has given b's 30 bytes back when d asks for `a`.
    for names, expected in (
        (("cpu", "cuda"), [51, 52]),  # pinned memory has `a` by then
        (("cuda", "cuda"), [51, 52]),
        (("cpu", "cpu"), [51, 52]),
    ):
        world = tiny.problem(ops, times, make_cluster(names))
        timeline = simulate(world, Candidate([0, 1, 1, 1, 0]))
        assert timeline.peak_bytes.tolist() == [51, 81]
        assert replayed_peaks(timeline).tolist() == expected
    # Until then, one of its kind holds it; a CPU's is in pinned memory, a GPU's has left.
    ops[4] = Op(name="e", outputs=[Output(7, keep=True)])
    times |= {"e": 50}
    for names, expected in (
        (("cpu", "cuda"), 50),
        (("cuda", "cpu"), 57),  # it leaves while e runs
        (("cuda", "cuda"), 57),
        (("cpu", "cpu"), 57),
    ):
        timeline = simulate(
            tiny.problem(ops, times, make_cluster(names)), Candidate([0, 1, 1, 1, 0])
        )
        assert replayed_peaks(timeline).tolist() == [expected, 52]


def test_a_gpu_has_a_parameter_that_it_fetches_from_before_its_reader_on():
    ops = [
        Op(name="w", outputs=[Output(50, persistent=True)]),
        Op(name="a", outputs=[30]),
        Op(name="b", inputs=["a"], outputs=[Output(1, keep=True)]),
        Op(name="c", inputs=["w", "b"], outputs=[Output(1, keep=True)]),
    ]
    for kind, expected in (("cuda", 81), ("cpu", 52)):  # beside a and b, or not before c
        world = tiny.problem(ops, {"a": 99, "b": 9, "c": 9}, make_cluster(("cpu", kind)))
        timeline = simulate(world, Candidate([0, 1, 1, 1]))
        assert replayed_peaks(timeline).tolist() == [50, expected]


def test_a_sum_receives_and_gives_back_one_tensor_after_the_other():
    made = [Op(name=name, outputs=[10]) for name in "xyz"]
    total = Op(name="s", kind="aten.add", inputs=[*"xyz"], outputs=[Output(10, keep=True)])
    world = tiny.problem([*made, total], {"x": 9, "y": 9, "z": 9, "s": 8}, cores())
    timeline = simulate(world, Candidate([1, 1, 1, 0]))
    assert timeline.peak_bytes.tolist() == [40, 30]
    assert replayed_peaks(timeline).tolist() == [30, 30]  # x, y and their sum; that, z, and s
    timeline = simulate(world, Candidate([0, 0, 0, 0]))
    assert replayed_peaks(timeline).tolist() == [40, 0]  # z waits here while x and y are added


def test_a_sending_core_holds_a_tensor_until_it_is_copied():
    ops = [
        Op(name="a", outputs=[50]),
        Op(name="b", outputs=[3]),
        Op(name="c", inputs=["a", "b"], outputs=[Output(1, keep=True)]),
        Op(name="d", outputs=[7]),
        Op(name="e", inputs=["d"], outputs=[Output(1, keep=True)]),
    ]
    # cpu:1 is busy with b until 200. Simulated, `a` has gone there before d makes 7 bytes on cpu:0.
    world = tiny.problem(ops, {"a": 10, "b": 200, "c": 10, "d": 100, "e": 10}, cores())
    timeline = simulate(world, Candidate([0, 1, 1, 0, 0]))
    assert timeline.peak_bytes.tolist() == [57, 54]
    assert replayed_peaks(timeline).tolist() == [58, 54]


def test_what_an_op_was_seen_to_take_counts_where_it_runs():
    ops = [Op(name="a", outputs=[50]), Op(name="b", inputs=["a"], outputs=[Output(1, keep=True)])]
    world = tiny.problem(ops, {"a": 10, "b": 10}, cores())
    seen = np.array([[5, 7], [20, 30]])
    world = Problem(world.graph, world.cluster, Costs(world.costs.op_ps, seen))
    assert replayed_peaks(simulate(world, Candidate([0, 0]))).tolist() == [50 + 1 + 20, 0]
    assert replayed_peaks(simulate(world, Candidate([1, 1]))).tolist() == [0, 50 + 1 + 30]


# Fitting.


def test_what_a_models_op_times_are_off_by_is_in_no_constant(monkeypatch):
    def spread():
        """Tell how far predictions are apart, by measured times, among the plans of a model."""
        found = fit_constants(samples)
        errors = {model: [] for model in off}
        for sample in samples:
            errors[sample.model].append(np.log(sample.replay.time_s(found) / sample.measured_s))
        return max(np.std(each) for each in errors.values())

    off = {"tiny-gpt2": 1.1, "tiny-nmt": 0.9}
    samples = [replace(s, measured_s=s.measured_s * off[s.model]) for s in planted()[1]]
    now = spread()
    monkeypatch.setattr(fidelity_fit, "MODEL_PRIOR", 1e3)
    assert now < 0.5 * spread()


def test_calibration_recovers_planted_constants():
    _, samples = planted()
    found = fit_constants(samples)
    assert found.kinds["cpu"].op_factor == pytest.approx(1.2, rel=0.03)
    assert found.kinds["cpu"].op_overhead_s == pytest.approx(15e-6, rel=0.15)
    assert found.transfer_overhead_s == pytest.approx(60e-6, rel=0.15)
    errors = [sample.replay.time_s(found) / sample.measured_s - 1 for sample in samples]
    assert np.abs(errors).max() < 0.02


def test_a_wild_measurement_does_not_spoil_the_fit():
    _, samples = planted()
    wild = samples[3]
    spoilt = [*samples[:3], Sample(wild.model, wild.replay, 5 * wild.measured_s), *samples[4:]]
    assert fit_constants(spoilt).kinds["cpu"].op_factor == pytest.approx(1.2, rel=0.1)


def test_residuals_are_split_into_what_plans_and_what_models_have():
    _, samples = planted()
    random = np.random.default_rng(0)
    shift = {"tiny-gpt2": 0.1, "tiny-nmt": -0.1}
    noisy = [
        Sample(s.model, s.replay, s.measured_s * math.exp(shift[s.model] + random.normal(0, 0.03)))
        for s in samples
    ]
    found = calibrate(noisy, ["a core"])
    assert found.num_models == 2
    assert len(found.residuals) == len(samples)
    assert found.within_sd < 0.08
    assert list(found.residuals) == sorted(found.residuals)


def test_too_few_plans_are_refused():
    _, samples = planted()
    with pytest.raises(InputError, match="1 plan is too few"):
        calibrate(samples[:1], [])
    with pytest.raises(InputError, match="no plan"):
        fit_constants([])
    with pytest.raises(InputError, match="no plan"):
        agreement([], [])


# How sure predictions are.


@pytest.mark.parametrize("size", [20, 60, 200])
def test_intervals_cover_nine_of_ten(size):
    random = np.random.default_rng(size)
    inside = total = 0
    for _ in range(400):
        # heavy tails, and no symmetry
        draws = np.exp(random.normal(size=size + 5)) * 0.05 + random.standard_t(4, size + 5) * 0.05
        found = made_up(draws[:size].tolist())
        inside += covered([1.0] * 5, np.exp(draws[size:]).tolist(), found)
        total += 5
    assert 0.88 <= inside / total <= 0.96


def test_interval_ends_are_order_statistics():
    residuals = [k / 100 for k in range(1, 40)]  # 39: the 2nd from each end
    assert conformal_ends(residuals) == (0.02, 0.38)
    assert conformal_ends([0.3, 0.1]) == (0.1, 0.3)
    found = interval(2.0, made_up((-0.1, 0.2)))
    assert (found.low_s, found.high_s) == pytest.approx((2 * math.exp(-0.1), 2 * math.exp(0.2)))
    with pytest.raises(InputError, match="no residual"):
        conformal_ends([])


def test_the_probability_to_be_faster_follows_the_error_within_a_model():
    found = made_up(within_sd=0.1, between_sd=5.0)  # what models have in common does not count
    assert probability_faster(1.0, 1.0, found) == 0.5
    assert probability_faster(1.0, math.exp(0.1 * math.sqrt(2)), found) == pytest.approx(
        0.8413, abs=1e-4
    )
    one, other = probability_faster(1.0, 1.05, found), probability_faster(1.05, 1.0, found)
    assert one + other == pytest.approx(1)
    assert one > 0.5


def test_probabilities_are_right_on_synthetic_plans():
    random, found = np.random.default_rng(1), made_up(within_sd=0.1)
    predicted = np.exp(random.normal(0, 0.15, (4000, 2)))
    measured = predicted * np.exp(random.normal(0, 0.1, (4000, 2)))
    likely = np.array([probability_faster(a, b, found) for a, b in predicted])
    is_faster = measured[:, 0] < measured[:, 1]
    for low in (0.1, 0.3, 0.5, 0.7, 0.9):
        near = np.abs(likely - low) < 0.1
        assert abs(is_faster[near].mean() - likely[near].mean()) < 0.06


# Agreement.


def test_agreement_is_what_scipy_says():
    random = np.random.default_rng(0)
    measured = random.uniform(1, 3, 30)
    predicted = measured * np.exp(random.normal(0, 0.2, 30))
    found = agreement(predicted, measured)
    near = measured <= 1.5 * measured.min()
    assert found.spearman == pytest.approx(stats.spearmanr(predicted, measured).statistic)
    assert found.kendall == pytest.approx(
        stats.kendalltau(predicted[near], measured[near]).statistic
    )
    assert found.num_near == near.sum()
    assert found.median_error == pytest.approx(np.median(np.abs(predicted / measured - 1)))
    assert found.worst_error == pytest.approx(np.abs(predicted / measured - 1).max())


def test_too_few_or_equal_times_have_no_correlation():
    assert agreement([1.0, 2.0], [1.0, 2.0]).spearman is None
    assert agreement([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).spearman is None


def test_peaks_are_compared_where_most_is_held():
    assert peak_error({"cpu:0": 90, "cpu:1": 5}, {"cpu:0": 100, "cpu:1": 1}) == pytest.approx(0.1)
    assert peak_error({"cpu:0": 90}, {"cpu:0": None}) is None


# Plans.


def test_chosen_times_cover_all_that_there_are_and_those_near_the_best_more_closely():
    every = np.concatenate([[40.0], np.linspace(1, 1.5, 51), np.linspace(2, 100, 50)])
    times = every[_choose(every, 20, [0])]
    assert list(times) == sorted(times)
    assert 40.0 in times  # the first
    assert times[0] == 1.0
    assert times[-1] == pytest.approx(100.0)
    near = times[times <= 1.5 + 1e-9]
    assert len(near) >= 10
    assert np.diff(near).max() < 0.1
    assert np.diff(np.log(times)).max() < 1.2
    assert len(_choose(every[:5], 20, [0])) == 5


def test_near_the_best_those_that_take_the_same_time_are_not_chosen_twice():
    every = np.array([9.0, 1.0, 1.004, 1.002, 1.1, 1.2, *np.linspace(2, 8, 30)])
    times = every[_choose(every, 20, [0])]
    assert sorted(times[times < 1.5]) == [1.0, 1.1, 1.2]
    assert len(times) == 20  # others, instead


def test_where_few_plans_are_near_the_best_some_are_made_of_it():
    # One device is a hundred times as fast: all that uses much of the other one is far off.
    problem = real_problem()
    op_ps = problem.costs.op_ps * np.array([100, 1])
    lopsided = Problem(problem.graph, problem.cluster, Costs(op_ps))
    plans = draw_plans(lopsided, 18, 3)
    lines = {p.name: simulate(lopsided, Candidate(p.placement)) for p in plans}
    times_s = {name: Replay.of(line).time_s(Constants()) for name, line in lines.items()}
    best_s = min(times_s.values())
    assert sum(time_s <= 1.5 * best_s for time_s in times_s.values()) >= 8
    assert any(plan.kind == "moved" for plan in plans)
    assert sum(plan.kind == "one device" for plan in plans) == 2
    assert not any(plan.kind == "moved" for plan in draw_plans(problem, 18, 3))


def test_plans_are_of_several_kinds_and_different():
    problem = real_problem()
    plans = draw_plans(problem, 18, 3)
    assert len(plans) == len({to_text(plan.placement) for plan in plans}) == 18
    assert len({plan.kind for plan in plans}) >= 4
    assert any(plan.kind == "one device" for plan in plans)
    assert len({plan.name for plan in plans}) == 18
    again = draw_plans(problem, 18, 3)
    assert [(p.name, to_text(p.placement)) for p in plans] == [
        (p.name, to_text(p.placement)) for p in again
    ]
    for plan in plans:
        problem.check(plan.placement)


def test_fewer_plans_than_four_are_refused():
    with pytest.raises(InputError, match="3 plans are too few"):
        draw_plans(diamond_on_cores(), 3)


def test_a_tiny_problem_has_fewer_plans_than_asked_for():
    assert 4 <= len(draw_plans(diamond_on_cores(), 200)) <= 16


# The folder, tables and pictures.


def record(plan="p", **more):
    fields = {
        "model": "m",
        "plan": plan,
        "kind": "split",
        "placement": "0101",
        "simulated_s": 1.0,
        "simulated_bytes": {"cpu:0": 10},
        "measured_s": 1.1,
        "machine": "a CPU",
        "placewright": "0",
        "torch": "2",
    }
    return Record(**{**fields, **more})


def test_records_come_back_and_the_later_one_counts(tmp_path):
    book = FidelityBook(tmp_path / "new")
    book.open()
    for each in (record("p"), record("q"), record("p", measured_s=2.0)):
        book.append(each)
    found = book.read()
    assert [*found] == [("m", "p"), ("m", "q")]
    assert found["m", "p"].measured_s == 2.0
    assert to_placement("0a1").tolist() == [0, 10, 1]
    with book.path.open("ab") as file:
        file.write(b"{}\n")
    with pytest.raises(InputError, match=r"Line 4 of .*no plan"):
        book.read()


def test_a_book_keeps_what_ops_take(tmp_path):
    book, problem = FidelityBook(tmp_path), real_problem("tiny-gpt2")
    book.open()
    problem.cluster.save(book.cluster_path)
    for seen in (None, np.arange(2 * problem.num_ops).reshape(-1, 2)):
        costs = Costs(problem.costs.op_ps, seen, None if seen is None else seen + 1)
        book.save_problem("m", Problem(problem.graph, problem.cluster, costs))
        found = book.load_problem("m").costs
        assert (found.op_ps == costs.op_ps).all()
        assert (found.scratch_bytes == (0 if seen is None else seen)).all()
        assert (found.idle_gain_ps == (0 if seen is None else seen + 1)).all()
    assert book.load_again("m") is None
    book.save_again("m", Costs(2 * costs.op_ps))
    assert (book.load_again("m").op_ps == 2 * costs.op_ps).all()
    assert (book.load_problem("m").costs.op_ps == costs.op_ps).all()
    np.save(tmp_path / "m.op-times.npy", np.stack([costs.op_ps] * 2))
    with pytest.raises(InputError, match="of an earlier version"):
        book.load_problem("m")


def test_there_is_no_table_of_peaks_where_none_was_measured(tmp_path, few_fits):
    book = filled_book(tmp_path)
    (tmp_path / "plans.jsonl").write_bytes(
        b"\n".join(
            msgspec.json.encode(msgspec.structs.replace(each, measured_bytes={}))
            for each in book.read().values()
        )
    )
    titles = [table.title for table in make_tables(read_fidelity(book))]
    assert [title.split(",")[0] for title in titles] == ["Step times", "Calibration"]


@pytest.fixture
def few_fits(monkeypatch):
    """Two deals, and three parts for residuals."""
    monkeypatch.setattr(fidelity_deals, "NUM_PAIRS", 1)
    monkeypatch.setattr(fidelity_fit, "NUM_FOLDS", 3)


def filled_book(folder, num_plans=16):
    """A bench that was run on a machine of planted constants, one failed plan among them."""
    constants, _ = planted()
    book, random = FidelityBook(folder), np.random.default_rng(0)
    book.open()
    for model in ("tiny-gpt2", "tiny-nmt"):
        problem = real_problem(model)
        problem.cluster.save(book.cluster_path)
        slower = Costs((problem.costs.op_ps * 1.3).astype(np.int64))
        book.save_problem(model, Problem(problem.graph, problem.cluster, slower))
        book.save_again(model, problem.costs)
        for k, plan in enumerate(draw_plans(problem, num_plans)):
            line = simulate(problem, Candidate(plan.placement))
            measured_s = Replay.of(line).time_s(constants) * math.exp(random.normal(0, 0.03))
            names = problem.cluster.device_names
            peaks = dict(zip(names, line.peak_bytes.tolist(), strict=True))
            fields = {"model": model, "kind": plan.kind}
            fields |= {"placement": to_text(plan.placement), "simulated_s": line.makespan_s}
            fields |= {"simulated_bytes": peaks, "measured_bytes": peaks}
            times = measured_s * np.array([1.5, 1.0]) * np.exp(random.normal(0, 0.02, 2))
            fields |= {"measured_s": measured_s, "processes_s": tuple(times.tolist())}
            book.append(record(plan.name, **fields))
            if k == 0:
                failed = {"measured_s": None, "failure": "memory", "reason": "It had too little."}
                failed["processes_s"] = ()
                book.append(record("broken", **{**fields, **failed}))
    return book


def test_tables_tell_of_every_model_and_calibration_helps(tmp_path, few_fits):
    book = filled_book(tmp_path)
    found = read_fidelity(book)
    times, peaks, constants = make_tables(found)
    assert [row[0] for row in times.rows] == ["tiny-gpt2", "", "", "tiny-nmt", "", ""]
    assert [row[2] for row in peaks.rows] == ["0.0%", "0.0%"]
    assert any("Failed: tiny-nmt, broken: It had too little." in note for note in times.notes)
    assert all(0.01 < result.noise_sd() < 0.03 for result in found.results)
    [note] = [note for note in times.notes if "ran in 2 processes" in note]
    assert f"by {np.median([r.noise_sd() for r in found.results]):.1%} (sd; median" in note
    assert any("Those differed by 30.0% (median model)" in note for note in times.notes)
    for rows in zip(*(times.rows[k::3] for k in range(3)), strict=True):
        raw, fitted, before = (float(row[4].split("%")[0]) for row in rows)
        assert fitted < min(raw, before, 10)
        assert [bool(row[-1]) for row in rows] == [False, False, True]
    assert dict(constants.rows)["op times on cpu, times"].startswith("1.")
    panels = make_panels(found)
    assert [len(panel.measured_s) for panel in panels] == [16, 16]
    errors = [np.divide(panel.predicted_s, panel.measured_s) - 1 for panel in panels]
    assert np.median(np.abs(errors)) < 0.06


def test_every_plan_is_tested_in_half_of_the_deals_and_fitted_to_in_the_others(monkeypatch):
    fitted_to = []

    def noting(samples, devices):
        fitted_to.append({id(sample) for sample in samples})
        return made_up()

    monkeypatch.setattr(fidelity_deals, "calibrate", noting)
    samples = {"odd": planted()[1][:5], "even": planted()[1][5:11]}
    deals = make_deals(samples, ["a core"])
    assert len(deals) == len(fitted_to) == 10
    for model, mine in samples.items():
        counts = [sum(k in deal.tested[model] for deal in deals) for k in range(len(mine))]
        assert counts == [5] * len(mine)
        order = np.argsort([sample.measured_s for sample in mine])
        for deal, fitted in zip(deals, fitted_to, strict=True):
            tested = {id(mine[k]) for k in deal.tested[model]}
            assert not tested & fitted
            assert {id(sample) for sample in mine} <= tested | fitted
            for a, b in zip(order[::2], order[1::2], strict=False):
                assert (a in deal.tested[model]) != (b in deal.tested[model])
    assert len({tuple(deal.tested["even"]) for deal in deals}) > 2


def test_as_many_plans_take_turns_as_memory_holds():
    problem = real_problem("tiny-gpt2")
    lines = [simulate(problem, Candidate(plan.placement)) for plan in draw_plans(problem, 8)]
    most = max(int(line.peak_bytes.max()) for line in lines) + fidelity.ROOM_BYTES["cpu"]
    for held, plans in ((100, 100), (12, 12), (0.5, 1)):
        memory = np.full(problem.num_devices, int(held * most))
        cluster = replace(problem.cluster, memory_bytes=memory)
        smaller = Problem(problem.graph, cluster, problem.costs)
        assert fidelity._at_a_time(smaller, lines) == plans
    dealt = fidelity._deal([*range(10)], 4)
    assert sorted(map(len, dealt)) == [3, 3, 4]
    assert sorted(k for group in dealt for k in group) == [*range(10)]


def test_pictures_are_equal_to_the_byte(tmp_path):
    panel = Panel("m$1", (0.01, 0.02, 0.5), (0.012, 0.019, 0.6), (0.9, 1.2))
    draw_scatter([panel] * 4, tmp_path / "a.svg")
    draw_scatter([panel] * 4, tmp_path / "b.svg")
    data = (tmp_path / "a.svg").read_bytes()
    assert data == (tmp_path / "b.svg").read_bytes()
    assert b"m$1" in data
    with pytest.raises(InputError, match="nothing to draw"):
        draw_scatter([], tmp_path / "c.svg")


def test_a_bench_that_was_run_is_shown_again(tmp_path, few_fits):
    filled_book(tmp_path / "out")
    page = tmp_path / "page.md"
    (tmp_path / "images").mkdir()
    page.write_text("Before.\n\n<!-- fidelity -->\n<!-- /fidelity -->\n\nAfter.\n")
    done = CliRunner().invoke(
        app,
        ["bench", "fidelity", "--render-only", "--out", str(tmp_path / "out"), "--markdown", page],
    )
    assert done.exit_code == 0, done.output
    assert "| tiny-gpt2 |" in page.read_text()
    assert page.read_text().startswith("Before.")
    assert (tmp_path / "out" / "fidelity-raw.svg").exists()
    assert (tmp_path / "images" / "page-raw.svg").exists()
    assert (tmp_path / "out" / "fidelity-calibrated.svg").exists()


def test_options_of_other_benches_are_refused(tmp_path):
    refused = CliRunner().invoke(app, ["bench", "fidelity", "--budget", "1s"])
    assert refused.exit_code == 2
    assert "`bench fidelity` has no `--budget`" in refused.output
    refused = CliRunner().invoke(app, ["bench", "table1", "--plans", "5", "--out", str(tmp_path)])
    assert refused.exit_code == 2
    assert "`--plans` is for `bench fidelity`" in refused.output


def test_nothing_measured_is_said_so(tmp_path):
    book = FidelityBook(tmp_path)
    book.open()
    with pytest.raises(InputError, match="has no plan that ran"):
        read_fidelity(book)
    with pytest.raises(InputError, match="2 plans are too few to fit and test"):
        make_deals({"m": planted()[1][:2]}, ["a core"])


def test_models_are_named_so_that_they_can_be_loaded():
    assert runnable("tiny-nmt") == "tiny-nmt"
    assert runnable("gpt2_training").endswith("fidelity_models.py:gpt2_training")
    assert set(QUICK_MODELS) <= set(MODELS)
    assert runnable("gpt2_training_large").endswith("fidelity_models.py:gpt2_training_large")
    assert FidelityChoice(is_quick=True).models_for(["cpu", "cpu"]) == QUICK_MODELS
    assert FidelityChoice().models_for(["cpu", "cuda"]) == tuple(f"{m}_large" for m in MODELS)
    assert FidelityChoice(models=["a", "a"]).models_for(["cuda"]) == ("a",)


@pytest.mark.slow
@pytest.mark.parametrize("model", [m + end for m in MODELS for end in ("", LARGE)])
def test_every_model_can_be_captured(model):
    pytest.importorskip("torch")
    graph = load_model(runnable(model))
    assert graph.num_ops > 20
    has_updates = "update" in graph.op_phases
    assert has_updates == ("training" in model)


# The file of a calibration.


def test_a_calibration_is_kept_for_its_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(
        calibrating, "device_keys", lambda names, kinds, models: ("x",) * len(names)
    )
    found = made_up()
    assert calibrating.read_calibration(cores()) is None
    path = calibrating.save_calibration(found, cores())
    assert path.parent == tmp_path / "op-times"
    assert calibrating.read_calibration(cores()) == found
    assert calibrating.read_calibration(cores(3)) is None
    path.write_text("{}")
    with pytest.raises(InputError, match="expected 'placewright-calibration'"):
        calibrating.read_calibration(cores())


def test_a_calibration_of_fewer_plans_does_not_replace_one_of_more(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACEWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setattr(calibrating, "device_keys", lambda names, *_: ("x",) * len(names))
    assert "is kept in" in _keep(made_up((0.1, 0.2)), cores())
    assert "of 2 plans stays; this one is of 1" in _keep(made_up((0.3,)), cores())
    assert calibrating.read_calibration(cores()).residuals == (0.1, 0.2)


def test_unknown_devices_have_no_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("PLACEWRIGHT_CACHE", str(tmp_path))
    assert calibrating.save_calibration(made_up(), cores()) is None
    assert calibrating.calibrated_devices(cores()) == ("cpu:0", "cpu:1")


@pytest.fixture
def measured_box(tmp_path, monkeypatch):
    """Two cores of this machine with a calibration and op times of a model, made up."""
    monkeypatch.setenv("PLACEWRIGHT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "box.toml"
    device = f'kind = "cpu"\nmodel = "{processor_model()}"'
    path.write_text(BOX.format(memory="4GiB").replace('kind = "cpu"', device))
    box, graph = Cluster.load(path), load_model("tiny-gpt2")
    (key, _) = device_keys(box.device_names, box.device_kinds, box.device_models)
    ops = {words: Timing(1e-4, 0.0, 5) for words in op_signatures(graph) if words}
    version = torch_version()
    add_times(Times(device=key, torch=version, issue_s=0.0, is_replayed=False, ops=ops))
    residuals = [math.log(x) for x in (0.9, 1.0, 1.2)]
    kinds = {"cpu": KindConstants(2.0, 0.0)}
    save_calibration(made_up(residuals, constants=Constants(kinds=kinds)), box)
    return path


def test_simulate_and_place_say_what_a_plan_would_take_here(measured_box):
    given = ["tiny-gpt2", "--cluster", str(measured_box)]
    done = CliRunner().invoke(app, ["simulate", *given, "--on", "cpu:0", "--json"])
    told = json.loads(done.stdout)
    expected = told["expected"]
    assert expected["time_s"] == pytest.approx(2 * told["makespan_s"])
    assert expected["low_s"] == pytest.approx(0.9 * expected["time_s"])
    assert expected["high_s"] == pytest.approx(1.2 * expected["time_s"])
    assert expected["peak_bytes"] == {"cpu:0": told["peak_bytes"]["cpu:0"]}
    assert expected["num_plans"] == 3
    words = CliRunner().invoke(app, ["place", *given, "--budget", "20 samples"]).stdout
    assert "Run on this machine, it should take" in " ".join(words.split())
    done = CliRunner().invoke(app, ["simulate", *given, "--on", "cpu:0", "--no-profiled", "--json"])
    assert json.loads(done.stdout)["expected"] is None


def test_nothing_is_expected_where_op_times_are_not_measured(measured_box):
    given = ["tiny-resnet", "--cluster", str(measured_box), "--on", "cpu:0", "--json"]
    done = CliRunner().invoke(app, ["simulate", *given])
    assert json.loads(done.stdout)["expected"] is None


def test_place_judges_by_what_a_plan_would_take_here(measured_box):
    given = ["place", "tiny-gpt2", "--cluster", str(measured_box), "--budget", "40 samples"]
    done = CliRunner().invoke(app, [*given, "--json"])
    told = json.loads(done.stdout)
    assert told["basis"] == "expected"
    assert told["objective_s"] == told["expected"]["time_s"] > told["makespan_s"]
    done = CliRunner().invoke(app, given)
    assert "they should take on this machine (calibrated with 3 plans)." in done.stderr
    words = " ".join(done.stdout.split())
    assert "Expected step time on this machine" in words
    assert "Simulated step time" in words
    for more in (["--no-profiled"], ["--objective", "throughput"]):
        done = CliRunner().invoke(app, [*given, *more, "--json"])
        assert json.loads(done.stdout)["basis"] == "simulated"
    calibrating.calibration_path(Cluster.load(measured_box)).unlink()
    done = CliRunner().invoke(app, given)
    assert "on this machine (not calibrated: see `placewright bench fidelity`)." in done.stderr
    assert "Expected step time on this machine" in " ".join(done.stdout.split())
    assert "it should take" not in done.stdout


def test_an_evaluator_expects_what_is_predicted_of_each_candidate():
    problem, found = real_problem(), made_up(constants=planted()[0])
    some = [Candidate(plan.placement) for plan in draw_plans(problem, 6)]
    judge = ExpectedEvaluator(problem, found)
    told = judge.evaluate(some)
    assert told.objective_s.tolist() == [predict(problem, each, found) for each in some]
    assert told.peak_bytes.tolist() == [simulate(problem, c).peak_bytes.tolist() for c in some]
    assert told.overflow_bytes.tolist() == [0] * 6
    assert judge.num_samples == 6
    plain = ExpectedEvaluator(problem).evaluate(some)
    assert plain.objective_s.tolist() == [predict(problem, each, made_up()) for each in some]
    with pytest.raises(InputError, match="Only `latency` is known of real devices"):
        ExpectedEvaluator(problem, found, "throughput")


def test_a_search_keeps_together_what_is_slow_to_hand_over(tmp_path):
    problem = real_problem()
    slow = made_up(constants=Constants(transfer_overhead_s=1.0))
    plain = place(problem, budget="300 samples")
    judged = place(
        problem, budget="300 samples", evaluator=ExpectedEvaluator(problem, slow), folder=tmp_path
    )
    assert len({*plain.placement.tolist()}) == 2
    assert len({*judged.placement[~problem.graph.op_is_resident].tolist()}) == 1
    assert judged.basis == "expected"
    judged.save(tmp_path)
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert all(json.loads(line)["expected"] for line in lines)


def test_compare_says_how_likely_the_best_is_faster():
    found = made_up(constants=planted()[0], within_sd=0.1)
    problem = real_problem()
    judge = ExpectedEvaluator(problem, found)
    rows = compare_placers(problem, ["cpu-only", "heft"], "50 samples", judge=judge)
    best, other = rows
    assert best.best_is_faster is None
    assert other.best_is_faster == pytest.approx(
        probability_faster(best.objective_s, other.objective_s, found)
    )
    (words,) = describe_chances(rows)
    assert f"{best.placer} (" in words
    assert f"{other.best_is_faster:.0%}" in words
    for plain in (None, ExpectedEvaluator(problem)):
        rows = compare_placers(problem, ["cpu-only", "heft"], "50 samples", judge=plain)
        assert describe_chances(rows) == []


# On this machine.


@pytest.mark.slow
def test_a_quick_bench_measures_four_plans_and_goes_on_where_it_was(
    tmp_path, monkeypatch, few_fits
):
    pytest.importorskip("torch")
    from placewright.execute.devices import list_devices

    if sum(device.name.startswith("cpu:") for device in list_devices()) < 2:
        pytest.skip("needs two cores")
    monkeypatch.setenv("PLACEWRIGHT_CACHE", str(tmp_path / "cache"))
    cluster = tmp_path / "cores.toml"
    from placewright.execute.op_times import processor_model

    machine = two_cores(processor_model())
    machine.save(cluster)
    options = ["--quick", "--models", "tiny-gpt2", "--plans", "4", "--out", tmp_path / "out"]
    options += ["--cluster", cluster]
    done = CliRunner().invoke(app, ["bench", "fidelity", *map(str, options)])
    assert done.exit_code == 0, done.output
    book = FidelityBook(tmp_path / "out")
    first = book.path.read_bytes()
    found = [*book.read().values()]
    assert len(found) == 4
    assert all(each.measured_s == sum(each.processes_s) / 2 > 0 for each in found)
    before, again = book.load_problem("tiny-gpt2").costs, book.load_again("tiny-gpt2")
    assert again.op_ps.shape == before.op_ps.shape
    assert "Calibration" in done.output
    again = CliRunner().invoke(app, ["bench", "fidelity", *map(str, options)])
    assert again.exit_code == 0, again.output
    assert book.path.read_bytes() == first
    assert calibrating.read_calibration(Cluster.load(book.cluster_path)) is not None


def two_cores(model):
    import dataclasses

    world = make_cluster(("cpu", "cpu"), latency_ps=5e6, bytes_per_ps=5e-3, memory=2**33)
    return dataclasses.replace(world, device_models=(model, model))
