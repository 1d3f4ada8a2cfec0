"""Training: budgets, bad rewards, checkpoints that are gone on with, and planted problems."""

from __future__ import annotations

import builtins
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placewright.errors import InputError
from placewright.evaluate import Evaluations, SimulatedEvaluator
from placewright.graph_file import Op, Output
from placewright.placers.run import Budget, Run
from placewright.placing import place
from placewright.policies import (
    POLICIES,
    Hierarchical,
    Learned,
    Training,
    learned,
    memory,
    with_options,
)
from placewright.policies.interrupt import HeldInterrupt
from placewright.problem import Problem

from . import tiny
from .worlds import make_cluster

torch = pytest.importorskip("torch")

from placewright.policies import hierarchical  # noqa: E402
from placewright.policies.checkpoint import STATE, VERSION, WEIGHTS  # noqa: E402
from placewright.policies.seq2seq import Groups, Limits, Placer  # noqa: E402
from placewright.policies.training import Sample, train  # noqa: E402

SMALL = {
    "colocrl": with_options(POLICIES["colocrl"], {"hidden": 8}),
    "hierarchical": with_options(POLICIES["hierarchical"], {"hidden": 8, "num_groups": 8}),
    "hierarchical-plus": with_options(
        POLICIES["hierarchical-plus"],
        {"hidden": 8, "num_groups": 8, "num_placements": 4, "cycle_samples": 40},
    ),
}
"""The learned placers, small; a batch is 10, 4 and 8 samples; the last begins anew after 40."""


def wide(times=(10, 10), memory=10**6, length=6):
    """Two chains side by side, `a` and `b`; an op takes so many picoseconds on either device."""
    ops = []
    for k in range(length):
        for kind in "ab":
            inputs = [f"{kind}{k - 1}"] if k else []
            output = Output(1, keep=k == length - 1)
            ops.append(
                Op(name=f"{kind}{k}", kind=kind, inputs=inputs, outputs=[output], module=f"l.{k}")
            )
    rows = {op.name: times if op.kind == "a" else times[::-1] for op in ops}
    return tiny.problem(ops, rows, make_cluster(memory=memory))


class Judge:
    """An evaluator that is told what placements cost, and keeps the mean of every batch."""

    objective = "latency"
    overlap = True
    basis = "simulated"

    def __init__(self, problem, cost, overflow=0):
        self.problem, self.cost, self.overflow = problem, cost, overflow
        self.num_samples, self.means, self.batches = 0, [], []

    def evaluate(self, candidates):
        placements = np.stack([candidate.placement for candidate in candidates])
        self.num_samples += len(placements)
        time_s = np.asarray(self.cost(placements), dtype=np.float64)
        self.means.append(float(time_s.mean()))
        self.batches.append(placements)
        count = len(placements)
        over = np.broadcast_to(np.int64(self.overflow), count)
        peaks = np.zeros((count, self.problem.num_devices), np.int64)
        return Evaluations(time_s, over, peaks)


# --- Training. ---


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_and_samples_give_the_same_answer_to_the_bit(name):
    runs = [place(wide(), SMALL[name], budget="120 samples", seed=4) for _ in range(2)]
    told = [[(e.samples, e.objective_s, e.mean_s) for e in run.history] for run in runs]
    assert told[0] == told[1]
    assert (runs[0].placement == runs[1].placement).all()


def test_another_seed_gives_other_samples():
    runs = [place(wide(), SMALL["hierarchical"], budget="40 samples", seed=s) for s in (1, 2)]
    assert runs[0].history[-1].mean_s != runs[1].history[-1].mean_s


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("samples", [1, 10, 43, 130])
def test_a_budget_of_samples_is_kept_exactly(name, samples):
    judge = SimulatedEvaluator(wide())
    run = Run(judge.problem, judge, budget=Budget(samples=samples))
    SMALL[name](run)
    first = SMALL[name].settings.num_placements  # an answer comes before the budget is asked
    first *= getattr(SMALL[name].settings, "num_groupings", 1)
    assert run.num_samples == max(samples, first)


@pytest.mark.parametrize("name", SMALL)
def test_where_nothing_fits_there_is_a_reason(name):
    result = place(wide(memory=1), SMALL[name], budget="100 samples")
    assert not result.is_feasible
    assert result.reason.startswith(("Nothing fits", "No placement that fits"))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_training_goes_on_past_times_that_are_no_numbers(name, bad):
    # All on the second device is best; whatever has its first op on the first one breaks.
    def cost(placements):
        return np.where(placements[:, 0] == 0, bad, 1 + (placements == 0).mean(axis=1))

    judge = Judge(wide((10, 25)), cost)  # devices that are not equal: none must be taken first
    run = Run(judge.problem, judge, budget=Budget(samples=600))
    SMALL[name](run)
    assert 200 < run.num_samples <= 600  # it may stop early, once it is sure
    assert run.best is not None
    assert run.best.placement[0] == 1
    assert run.key[1] < 1.2


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_first_batch_without_a_number_is_not_the_best_for_ever(bad):
    def cost(placements):
        return np.full(len(placements), bad if judge.num_samples <= 16 else 2.0)

    judge = Judge(wide(), cost)
    run = Run(judge.problem, judge, budget=Budget(samples=80))
    SMALL["hierarchical-plus"](run)
    assert run.num_samples == 80
    assert run.key == (0, 2.0)


@pytest.mark.parametrize("name", SMALL)
def test_times_that_are_never_numbers_end_with_the_budget(name):
    judge = Judge(wide(), lambda placements: np.full(len(placements), np.nan))
    run = Run(judge.problem, judge, budget=Budget(samples=80))
    SMALL[name](run)
    assert run.num_samples == 80


def weights_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / WEIGHTS)


def test_failures_are_ignored_once_they_are_to_be(tmp_path):
    # From the fifth batch on nothing fits; failures are ignored from the third on.
    placer = with_options(SMALL["hierarchical"], {"failures_ignored_after": 3})

    class Breaks(Judge):
        def evaluate(self, candidates):
            self.overflow = int(self.num_samples >= 16)
            return super().evaluate(candidates)

    found = {}
    for samples in (8, 16, 40):
        judge = Breaks(wide(), lambda placements: 1 + (placements == 0).mean(axis=1))
        folder = tmp_path / str(samples)
        run = Run(judge.problem, judge, budget=Budget(samples=samples), folder=folder)
        placer(run)
        found[samples] = weights_of(folder)
    names = [name for name in found[8] if name.startswith("policy/")]
    assert any(not torch.equal(found[8][name], found[16][name]) for name in names)
    assert all(torch.equal(found[16][name], found[40][name]) for name in names)


def test_failures_before_that_do_teach(tmp_path):
    placer = with_options(SMALL["hierarchical"], {"failures_ignored_after": "none"})
    found = []
    for samples in (8, 16):
        judge = Judge(wide(), lambda placements: np.ones(len(placements)), overflow=1)
        folder = tmp_path / str(samples)
        placer(Run(judge.problem, judge, budget=Budget(samples=samples), folder=folder))
        found.append(weights_of(folder))
    assert any(not torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_weights_that_have_grown_too_large_are_told_of():
    placer = with_options(
        SMALL["hierarchical"], {"learning_rate": 1e15, "tanh_constant": 0, "temperature": 1}
    )
    with pytest.raises(InputError, match="Try a smaller `learning_rate`"):
        place(wide((10, 40)), placer, budget="400 samples")


# --- Checkpoints. ---


def same_tensors(left, right):
    a, b = weights_of(left), weights_of(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def told_of(result):
    """What must be equal of two runs: all but the seconds they took."""
    return (
        result.placement.tolist(),
        result.objective_s,
        result.samples,
        [(e.samples, e.objective_s, e.mean_s, e.feasible) for e in result.history],
    )


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("first", [40, 63, 96])
def test_a_resumed_run_ends_as_one_that_was_never_interrupted(tmp_path, name, first):
    problem = wide((10, 25))
    whole = place(problem, SMALL[name], budget="240 samples", folder=tmp_path / "whole", seed=3)
    parts = tmp_path / "parts"
    place(problem, SMALL[name], budget=f"{first} samples", folder=parts, seed=3)
    for samples in (130, 240):
        last = place(
            problem, SMALL[name], budget=f"{samples} samples", folder=parts, seed=3, resume=True
        )
    assert told_of(last) == told_of(whole)
    assert same_tensors(tmp_path / "whole", parts)
    state = [json.loads((f / STATE).read_text()) for f in (tmp_path / "whole", parts)]
    for words in state:
        words.pop("wall_s")
    assert state[0] == state[1]


def test_the_best_from_before_a_run_went_on_is_confirmed_too(tmp_path):
    problem, placer = wide((10, 25), length=40), SMALL["hierarchical"]
    first = place(problem, placer, budget="24 samples", folder=tmp_path, seed=3)
    seen = {}

    class Confirming(Judge):
        """Knows what it has judged itself, as an evaluator that measures does."""

        def evaluate(self, candidates):
            found = super().evaluate(candidates)
            keys = [tuple(candidate.placement.tolist()) for candidate in candidates]
            seen.update(zip(keys, zip(found.objective_s, candidates, strict=True), strict=True))
            return found

        def confirm(self):
            time_s, candidate = min(seen.values(), key=lambda pair: pair[0])
            return candidate, float(time_s)

    def cost(placements):
        return np.where((placements == first.placement).all(axis=1), 1.0, 2.0)

    last = place(
        problem,
        placer,
        budget="26 samples",
        folder=tmp_path,
        seed=3,
        resume=True,
        evaluator=Confirming(problem, cost),
    )
    assert len(seen) > 1
    assert last.objective_s == 1.0
    assert last.placement.tolist() == first.placement.tolist()


def test_seconds_already_spent_count(tmp_path):
    place(wide(), SMALL["hierarchical"], budget="40 samples", folder=tmp_path)
    spent_s = json.loads((tmp_path / STATE).read_text())["wall_s"]
    result = place(
        wide(), SMALL["hierarchical"], budget_s=spent_s / 2, folder=tmp_path, resume=True
    )
    assert result.samples == 40
    assert result.wall_s >= spent_s


CHILD = """
import sys
from placewright.placing import place
from placewright.policies import training
from tests.test_learning import SMALL, wide

training.SAVE_EVERY_S = 0.0
slow = lambda run: __import__("time").sleep(0.01)
place(wide((10, 25)), SMALL["hierarchical-plus"], budget="480 samples", folder=sys.argv[1],
      seed=5, resume=sys.argv[2] == "resume", progress=slow)
"""


def run_and_kill(folder, how, until_samples):
    """Start a run in a process of its own, and kill it once it has saved so many samples."""
    root = Path(__file__).parent.parent
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(folder), how],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
    )
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            assert child.poll() is None, "it ended before it was killed"
            state = folder / STATE
            if state.exists() and json.loads(state.read_text())["samples"] >= until_samples:
                break
            time.sleep(0.005)
        else:
            pytest.fail("no checkpoint within a minute")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()


def test_a_run_that_was_killed_twice_ends_as_one_that_was_not(tmp_path):
    folder = tmp_path / "killed"
    run_and_kill(folder, "begin", 60)
    first = json.loads((folder / STATE).read_text())["samples"]
    run_and_kill(folder, "resume", first + 80)
    second = json.loads((folder / STATE).read_text())["samples"]
    assert 0 < first < second < 480
    options = {"budget": "480 samples", "seed": 5}
    placer = SMALL["hierarchical-plus"]
    last = place(wide((10, 25)), placer, folder=folder, resume=True, **options)
    whole = place(wide((10, 25)), placer, folder=tmp_path / "whole", **options)
    assert told_of(last) == told_of(whole)
    assert same_tensors(folder, tmp_path / "whole")


# --- Ctrl-C. ---

needs_main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="needs the main thread"
)

INTERRUPTED = CHILD.replace("SAVE_EVERY_S = 0.0", "SAVE_EVERY_S = 1e9").replace(
    'slow = lambda run: __import__("time").sleep(0.01)',
    """
def slow(run):  # the middle of an update: its samples are timed, nothing is learned from them yet
    if run.num_samples == 128:
        print("now", flush=True)
        __import__("time").sleep(1)
""",
)


def test_ctrl_c_ends_the_update_and_saves_it(tmp_path):
    folder = tmp_path / "stopped"
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(folder), "begin"],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout.readline() == "now\n", child.stderr.read()
        assert not (folder / WEIGHTS).exists()
        child.send_signal(signal.SIGINT)
        errors = child.communicate(timeout=60)[1]
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, errors) == (0, "")  # `place` gave the best so far
    assert json.loads((folder / STATE).read_text())["samples"] == 128
    options = {"budget": "480 samples", "seed": 5}
    placer = SMALL["hierarchical-plus"]
    last = place(wide((10, 25)), placer, folder=folder, resume=True, **options)
    whole = place(wide((10, 25)), placer, folder=tmp_path / "whole", **options)
    assert told_of(last) == told_of(whole)
    assert same_tensors(folder, tmp_path / "whole")


@needs_main_thread
def test_a_second_ctrl_c_stops_at_once():
    with HeldInterrupt() as held:
        assert not held.has_come
        signal.raise_signal(signal.SIGINT)
        assert held.has_come
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@needs_main_thread
def test_ctrl_c_is_held_nowhere_else():
    def handlers(holds=True):
        with HeldInterrupt(holds):
            seen.append(signal.getsignal(signal.SIGINT))

    seen = []
    handlers(holds=False)
    other = threading.Thread(target=handlers)
    other.start()
    other.join()
    assert seen == [signal.default_int_handler] * 2
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        handlers()
        assert signal.getsignal(signal.SIGINT) is seen[-1] is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def kept(tmp_path):
    """A folder with a checkpoint."""
    place(wide(), SMALL["hierarchical"], budget="12 samples", folder=tmp_path / "run")
    return tmp_path / "run"


def refused(folder, words, problem=None, placer=None, **more):
    problem, placer = problem or wide(), placer or SMALL["hierarchical"]
    before = (folder / WEIGHTS).read_bytes() if (folder / WEIGHTS).exists() else None
    with pytest.raises(InputError, match=words) as caught:
        place(problem, placer, **{"budget": "40 samples", "folder": folder, "resume": True, **more})
    assert "\n" not in str(caught.value)
    after = (folder / WEIGHTS).read_bytes() if (folder / WEIGHTS).exists() else None
    assert before == after


def test_a_checkpoint_of_anything_else_is_refused(kept):
    refused(kept, "is of another graph", problem=wide(length=5))
    refused(kept, "is of other op times, links, memory, modules or shapes", problem=wide((10, 11)))
    refused(
        kept, "is of other op times, links, memory, modules or shapes", problem=wide(memory=1000)
    )
    refused(kept, "is of the objective latency", objective="throughput")
    refused(kept, "is of the seed 0", seed=1)
    refused(kept, "another placer", placer=SMALL["colocrl"])
    other = with_options(SMALL["hierarchical"], {"num_groups": 4})
    refused(kept, re.escape("other settings (`num_groups`)"), placer=other)
    other = with_options(SMALL["hierarchical"], {"learning_rate": 0.3})
    refused(kept, re.escape("other settings (`learning_rate`)"), placer=other)


def test_a_checkpoint_of_another_cluster_is_refused(kept):
    ours = wide()
    cluster = make_cluster(["cpu", "cuda"], memory=10**6)
    refused(kept, "is of another cluster", problem=Problem(ours.graph, cluster, ours.costs))


def test_a_checkpoint_with_another_grouping_is_refused(kept, tmp_path):
    grouping = np.repeat([0, 1, 2], 4)
    refused(kept, "is of another grouping", grouping=grouping)
    folder = tmp_path / "grouped"
    placer = SMALL["colocrl"]
    place(wide(), placer, budget="20 samples", folder=folder, grouping=grouping)
    other = np.repeat([0, 1], 6)
    refused(folder, "is of another grouping", placer=placer, grouping=other)
    refused(folder, "is of another grouping", placer=placer)


def test_a_checkpoint_of_another_version_is_refused(kept):
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(kept / WEIGHTS, "pt") as file:
        values = json.loads(file.metadata()["placewright"])
    values["version"] = VERSION + 1
    metadata = {"placewright": json.dumps(values)}
    save_file(weights_of(kept), kept / WEIGHTS, metadata=metadata)
    refused(kept, f"is of version {VERSION + 1}; expected {VERSION}")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_a_checkpoint_that_was_cut_short_is_refused(kept, share):
    data = (kept / WEIGHTS).read_bytes()
    (kept / WEIGHTS).write_bytes(data[: int(share * len(data))])
    refused(kept, "cannot be read")


def test_a_file_that_is_no_checkpoint_is_refused(kept):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, kept / WEIGHTS)
    refused(kept, "cannot be read")
    save_file({"x": torch.zeros(1)}, kept / WEIGHTS, metadata={"placewright": "{}"})
    refused(kept, "is no checkpoint of a placewright run")
    (kept / WEIGHTS).write_bytes(b"nonsense")
    refused(kept, "cannot be read")


def test_a_folder_with_a_checkpoint_is_not_overwritten(kept):
    refused(kept, "holds the checkpoint of a run. Go on with it", resume=False)


def test_nothing_to_go_on_with_is_refused(tmp_path):
    refused(tmp_path, "There is no checkpoint to go on with")
    refused(tmp_path / "nowhere", "There is no checkpoint to go on with")
    assert not (tmp_path / "nowhere").exists()


def test_only_learned_placers_with_a_folder_are_resumed(tmp_path):
    with pytest.raises(InputError, match="Only learned placers can do that: colocrl"):
        place(wide(), "annealing", folder=tmp_path, budget="10 samples", resume=True)
    with pytest.raises(InputError, match="Only learned placers can do that: colocrl"):
        place(wide(), "annealing", tensorboard=tmp_path, budget="10 samples")
    with pytest.raises(InputError, match="`resume` needs a folder"):
        place(wide(), SMALL["colocrl"], budget="10 samples", resume=True)


def test_a_negative_seed_is_refused():
    with pytest.raises(InputError, match="`seed` is -1; expected a whole number"):
        place(wide(), SMALL["colocrl"], budget="10 samples", seed=-1)


def test_a_folder_that_cannot_be_made_is_told_of(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be made"):
        place(
            wide(), SMALL["hierarchical"], budget="12 samples", folder=tmp_path / "file" / "below"
        )


# --- TensorBoard. ---


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scalars_are_written_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place(wide(), SMALL["hierarchical"], budget="40 samples", tensorboard=tmp_path)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {*events.Tags()["scalars"]} >= {"best_s", "mean_s", "feasible", "entropy"}
    assert [event.step for event in events.Scalars("mean_s")] == [*range(4, 41, 4)]
    best = [event.value for event in events.Scalars("best_s")]
    assert best == sorted(best, reverse=True)


def test_without_tensorboard_it_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(InputError, match=re.escape('pip install "placewright[tensorboard]"')):
        place(wide(), SMALL["hierarchical"], budget="40 samples", tensorboard=tmp_path)


def test_without_pytorch_it_is_told_what_to_install(monkeypatch):
    whole = builtins.__import__

    def without(name, *args, **more):
        if name == "torch":
            raise ImportError(name)
        return whole(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=re.escape('pip install "placewright[torch]"')):
        place(wide(), SMALL["hierarchical"], budget="40 samples")


# --- Before the clock begins. ---

REHEARSED = """
import sys
from numba.core.dispatcher import Dispatcher
from placewright.load import load_model, load_problem
from placewright.placing import place, prepare

def compiled():
    ours = [module for name, module in sys.modules.items() if name.startswith("placewright")]
    loops = [value for module in ours for value in vars(module).values()]
    return {(str(f), s) for f in loops if isinstance(f, Dispatcher) for s in f.signatures}

problem = load_problem(load_model("tiny-nmt"), "k40x2")
options = {"hidden": 8, "cycle_samples": 70}
prepare(problem, sys.argv[1], options)
before = compiled()
assert len(before) > 5
place(problem, sys.argv[1], options=options, budget="140 samples")
assert compiled() == before, compiled() - before
"""


@pytest.mark.parametrize("name", POLICIES)
def test_once_prepared_a_placer_compiles_nothing(name):
    subprocess.run(
        [sys.executable, "-c", REHEARSED, name],
        cwd=Path(__file__).parent.parent,
        check=True,
        timeout=300,
    )


def test_preparing_draws_nothing_from_random_numbers_that_all_share():
    learned._rehearse.cache_clear()
    before = torch.get_rng_state(), repr(np.random.get_state())  # noqa: NPY002
    SMALL["hierarchical-plus"].prepare(wide())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == repr(np.random.get_state())  # noqa: NPY002


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hierarchical", {"hidden": 100_000_000}),
        ("hierarchical", {"num_placements": 10_000_000_000}),
        ("hierarchical", {"grouper_hidden": 10**12}),
        ("hierarchical", {"num_outputs": 10**12}),
        ("hierarchical-plus", {"num_groupings": 10**12}),
        ("hierarchical-grappler", {"num_neighbours": 10**12}),
        ("colocrl", {"hidden": 2**52}),
        ("colocrl", {"num_placements": 10**12}),
    ],
)
def test_what_takes_more_memory_than_there_is_is_refused_by_name(name, options):
    (option,) = options
    with pytest.raises(InputError, match=f"`{option}={options[option]}`") as caught:
        place(wide(), name, budget="1 samples", options=options)
    assert "Training this policy would take" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_many_groups_of_few_ops_are_no_more_than_there_are_ops():
    for name in ("hierarchical", "hierarchical-plus"):
        options = {"num_groups": 10**9, "hidden": 8}
        assert place(wide(), name, budget="4 samples", options=options).is_feasible
    options = {"max_groups": 10**9, "hidden": 8}
    assert place(wide(), "colocrl", budget="10 samples", options=options).is_feasible


def test_it_is_told_how_much_memory_it_would_take(monkeypatch):
    monkeypatch.setattr(memory, "_machine_bytes", lambda: 2**20)
    problem = wide(length=100)  # 200 ops
    with pytest.raises(InputError) as caught:
        memory.check_memory(problem, Hierarchical(num_groups=10**9, num_placements=64))
    # 64 samples of 200 groups: 16 x 256 floats for each and 2 for each pair, and the rest.
    about = 64 * 200 * (16 * 256 + 2 * 200) * 4 / 2**20
    words = re.fullmatch(
        r"Training this policy would take about (\d+\.\d\d) MiB of memory, and this machine has"
        r" 1\.00 MiB\. What makes it so large: `num_groups=1000000000`, `num_placements=64`,"
        r" `hidden=256`\. Make that smaller\.",
        str(caught.value),
    )
    assert about < float(words[1]) < 1.2 * about
    with pytest.raises(InputError, match=r"What makes it so large: `grouping=none`"):
        memory.check_memory(problem, Hierarchical(grouping="none", num_groups=2, hidden=8))


# --- Planted problems: each is solved by the policy, and not without the part that it needs. ---

SEEDS = (0, 1, 2)
PLANTED = Training(
    reward="identity",
    failure_s=1.5,  # the first baseline: what a policy that knows nothing costs
    learning_rate=0.01,
    temperature=1.0,
    tanh_constant=0.0,
)


class Told:
    """
    The first group says a word, and all groups should be on the device that it stands for.

    The word is drawn anew for each sequence; half of the words stand for either of two devices.
    The encoder reads forwards, so that the word is far in the past when the decoder begins.
    """

    num_groupings, num_placements, hidden, is_bidirectional = 16, 4, 16, False

    def __init__(self, num_groups, size=2, offset_s=1.0):
        self.num_groups, self.size, self.offset_s = num_groups, size, offset_s

    def draw(self, random):
        count, length = self.num_groupings, self.num_groups
        words = random.integers(0, self.size, count)
        self.wanted = words % 2
        embedding = torch.zeros(count, length, self.size)
        embedding[torch.arange(count), 0, torch.from_numpy(words)] = 4.0
        allowed = np.ones((count, length, 2), dtype=np.bool_)
        return Groups(np.full(count, length), embedding, allowed, np.zeros((count, length)))

    def cost(self, placements):
        wanted = np.repeat(self.wanted, self.num_placements)
        return self.offset_s + (placements != wanted[:, None]).mean(axis=1)


class Follow:
    """
    The first group may run on one of two devices only; the others should go where it went.

    Which one it is is drawn anew for each sequence, and in no embedding.
    """

    num_groupings, num_placements, hidden, size, is_bidirectional = 8, 4, 16, 1, True
    num_groups = 6

    def draw(self, random):
        count, length = self.num_groupings, self.num_groups
        allowed = np.ones((count, length, 2), dtype=np.bool_)
        allowed[:, 0] = np.eye(2, dtype=np.bool_)[random.integers(0, 2, count)]
        embedding = torch.ones(count, length, 1)
        return Groups(np.full(count, length), embedding, allowed, np.zeros((count, length)))

    def cost(self, placements):
        return 1 + (placements[:, 1:] != placements[:, :1]).mean(axis=1)


class Alone:
    """A policy that is a Placer alone, on the groups of a planted problem."""

    def __init__(self, world, take_out):
        self.world = world
        self.num_samples = world.num_groupings * world.num_placements
        self.networks = Placer(world.size, world.hidden, 2, world.is_bidirectional)
        take_out(self.networks)

    def sample(self, random, shaping):
        world = self.world
        groups = world.draw(random)
        limits = Limits.none(2)
        choice = self.networks.sample(groups, world.num_placements, shaping, limits, random)
        zero = torch.zeros(world.num_groupings, 1)
        return Sample(choice.devices, choice.log_chance, zero, choice.entropy.mean(), None)


def nothing(_):
    """Take nothing out."""


def take_out(weights, rows):
    """Set rows of weights to zero for ever."""
    with torch.no_grad():
        weights[rows] = 0.0

    def stop(slopes):
        slopes = slopes.clone()
        slopes[rows] = 0.0
        return slopes

    weights.register_hook(stop)


def without_attention(placer):
    """Hide what is attended to from the devices' scores."""
    take_out(placer.to_scores, slice(placer.recurrent.shape[0], None))


def without_device_embedding(placer):
    """Hide from the decoder what it chose before."""
    take_out(placer.embed, slice(None))


def learned_cost(world, seed, num_updates, settings=PLANTED, without=nothing):
    """Train, and give the mean cost of the last ten batches."""
    judge = Judge(tiny.chain(), world.cost)
    num_samples = num_updates * world.num_groupings * world.num_placements
    run = Run(judge.problem, judge, seed, Budget(samples=num_samples))
    train(run, lambda _: Alone(world, without), settings, {})
    return np.mean(judge.means[-10:])


def test_a_word_from_far_away_is_heard_with_attention_and_not_without():
    for seed in SEEDS:
        assert learned_cost(Told(80), seed, 50) < 1.05
        assert learned_cost(Told(80), seed, 50, without=without_attention) > 1.35


def test_groups_follow_the_first_with_device_embeddings_and_not_without():
    for seed in SEEDS:
        assert learned_cost(Follow(), seed, 80) < 1.05
        assert learned_cost(Follow(), seed, 80, without=without_device_embedding) > 1.35


@pytest.mark.parametrize("baseline", ["moving-average", "leave-one-out"])
def test_small_differences_of_large_costs_are_learned_with_a_baseline_and_not_without(baseline):
    settings = replace(PLANTED, failure_s=100.5)
    for seed in SEEDS:
        world = Told(1, size=16, offset_s=100.0)
        with_one = learned_cost(world, seed, 60, replace(settings, baseline=baseline))
        assert with_one < 100.05
        assert learned_cost(world, seed, 60, replace(settings, baseline="none")) > 100.25


def test_ops_that_belong_apart_are_grouped_apart_with_the_groupers_gradient_and_not_without(
    monkeypatch,
):
    # Ops `a` are quick on one device, ops `b` on the other: 80 ps if all are where they should be,
    # 880 ps if all are on one device, and about 700 if groups are mixed.
    problem = wide((10, 100), length=8)
    placer = Learned(
        Hierarchical(
            num_groups=2,
            num_groupings=16,
            num_placements=2,
            hidden=16,
            training=replace(PLANTED, reward="improvement", baseline="leave-one-out"),
        )
    )

    def mean_ps(seed):
        result = place(problem, placer, budget=f"{32 * 80} samples", seed=seed)
        means = [entry.mean_s for entry in result.history if entry.mean_s is not None]
        return 1e12 * np.mean(means[-5:])

    assert [mean_ps(seed) for seed in SEEDS] == pytest.approx([80] * 3, rel=0.5)
    whole = hierarchical.Planner.sample

    def without_gradient(self, random, shaping):
        sample = whole(self, random, shaping)
        return replace(sample, group_log_chance=sample.group_log_chance.detach())

    monkeypatch.setattr(hierarchical.Planner, "sample", without_gradient)
    assert min(mean_ps(seed) for seed in SEEDS) > 400
