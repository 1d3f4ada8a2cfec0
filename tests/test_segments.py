"""Segments: adjacent ops of a device recorded once and replayed, or compiled."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
import shutil
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

import placewright as pw

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from placewright.execute import program, runtime  # noqa: E402
from placewright.execute._shares import count_multiprocessors  # noqa: E402
from placewright.execute._source import Line, Style, count_segments, write_lane  # noqa: E402
from placewright.execute.devices import RealDevice  # noqa: E402
from placewright.execute.graphs import WARM_UP, CudaRecorder, Segments  # noqa: E402
from placewright.execute.placed import PlacedStep, sequence_of, whole_step  # noqa: E402
from tests.marks import one_thread  # noqa: E402
from tests.test_execute import (  # noqa: E402, F401
    BOX,
    GPU,
    TINY,
    box,
    on_gpu,
    random_placement,
    step_of,
)

pytestmark = one_thread
NUM_STEPS = WARM_UP + 4


class Tape(TorchDispatchMode):
    """A recording on a CPU: calls are noted, and those that overwrite something are not made."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            made = args[0] if func._schema.returns else None
        else:
            made = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, made))
        return made

    def replay(self):
        for func, args, kwargs, made in self.calls:
            found = func(*args, **kwargs)
            if func._schema.is_mutable or func.is_view:
                continue
            for old, new in zip(_tensors(made), _tensors(found), strict=True):
                old.copy_(new)


def _tensors(found):
    return [found] if isinstance(found, torch.Tensor) else [*found]


class CpuRecorder:
    """Records on a CPU, as `CudaRecorder` does on a GPU."""

    def __init__(self):
        self.tape = None
        self.waited = []

    def begin(self):
        self.enter(Tape())

    def enter(self, tape):
        self.tape = tape
        tape.__enter__()

    def end(self):
        made, self.tape = self.tape, None
        made.__exit__(None, None, None)
        return made

    def abort(self):
        if self.tape is not None:
            self.end()

    def room(self):
        return contextlib.nullcontext()

    def alias(self, tensor):
        return tensor

    def wait_for(self, event):
        self.waited.append(event)

    def clear(self):
        pass


@pytest.fixture
def recorded(monkeypatch):
    """Have segments of cores recorded, too."""
    monkeypatch.setattr(program._Compiler, "can_record", lambda self, lane: True)
    monkeypatch.setattr(runtime.Runner, "_segments", lambda self, lane: Segments(CpuRecorder()))


def run_steps(step, module, timeline, given, **options):
    """Run several steps, each on other inputs; give losses and outputs, then parameters."""
    torch.manual_seed(0)
    ours = copy.deepcopy(module)
    placed = PlacedStep.of_timeline(step, ours, timeline, **options)
    random = np.random.default_rng(0)
    found = []
    for _ in range(NUM_STEPS):
        fed = [each[torch.from_numpy(random.permutation(len(each)))] for each in given]
        found.append([each.cpu() for each in placed.run(fed)])
    placed.close()
    return found, [parameter.detach().cpu() for parameter in ours.parameters()]


def assert_same(one, other, tolerance=0.0):
    for x, y in zip(one, other, strict=True):
        if tolerance == 0.0 or not x.is_floating_point():
            assert torch.equal(x, y)
        else:
            scale = max(float(y.abs().max()), 1e-3)
            assert float((x - y).abs().max()) <= tolerance * scale


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-nmt"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_replayed_segments_give_the_same_to_the_bit(name, seed, box, recorded):  # noqa: F811
    module, inputs, given = step_of(name)
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, box)
    alone = np.zeros(problem.num_ops, dtype=np.int64)
    timeline = pw.simulate(problem, alone if seed is None else random_placement(problem, seed))
    fed = [*inputs, *given["targets"]]
    plain, plain_weights = run_steps(step, module, timeline, fed, graphs=False)
    found, weights = run_steps(step, module, timeline, fed)
    for one, other in zip(found, plain, strict=True):
        assert_same(one, other)
    assert_same(weights, plain_weights)
    assert not torch.equal(found[0][0], found[-1][0])  # it has learnt


def test_nothing_is_recorded_on_a_cpu(box):  # noqa: F811
    module, inputs, given = step_of("tiny-gpt2")
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, box)
    timeline = pw.simulate(problem, np.zeros(problem.num_ops, dtype=np.int64))
    placed = PlacedStep.of_timeline(step, copy.deepcopy(module), timeline)
    assert not placed.runner.program.recorded
    placed.close()


def test_names_are_let_go_of_in_every_mode():
    lines = [
        Line("r1 = feed(0, 0, F[0])", (), "r1"),
        Line("r2 = f(r1)", ("r1",), "r2", 0),
        Line("r3 = f(r2)", ("r2",), "r3", 0),
        Line("R[0] = give(0, r3)", ("r3",), None),
    ]
    assert count_segments(lines) == 1
    assert write_lane(lines, 0, {}, Style(is_recorded=True)).splitlines() == [
        "def run(P, S, F, R):",
        "    r1 = feed(0, 0, F[0])",
        "    if begin(0):",
        "        r2 = f(r1)",
        "        del r1",
        "        r3 = f(r2)",
        "        del r2",
        "        end(0, r3)",
        "    else:",
        "        [r3] = replay(0)",
        "        del r1",
        "    R[0] = give(0, r3)",
        "    del r3",
        "    return",
    ]


def test_a_step_that_fails_while_it_is_recorded_says_so(box, recorded):  # noqa: F811
    module, inputs, given = step_of("tiny-gpt2")
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, box)
    timeline = pw.simulate(problem, random_placement(problem, 0))
    placed = PlacedStep.of_timeline(step, module, timeline)
    fed = [*inputs, *given["targets"]]
    for _ in range(WARM_UP):
        placed.run(fed)

    class Asks(Tape):
        def __torch_dispatch__(self, *args, **kwargs):
            raise RuntimeError("It asks the device something.")

    for segments in placed.runner.segments.values():
        segments._recorder.begin = lambda r=segments._recorder: r.enter(Asks())
    with pytest.raises(RuntimeError, match="asks the device") as caught:
        placed.run(fed)
    assert "`graphs=False` leaves that out" in caught.value.__notes__[0]
    for _ in range(WARM_UP):
        placed.run(fed)  # begins anew
    placed.close()
    assert torch.ones(1).item() == 1.0  # nothing is recorded any more


def test_what_is_copied_away_is_held_until_the_second_segment_after():
    recorder = CpuRecorder()
    segments = Segments(recorder)
    for _ in range(WARM_UP + 1):
        segments.begin_step()
        for number in range(3):
            segments.begin(number)
            segments.end(number)
            if segments.is_fixed and number == 0:
                segments.hold(torch.zeros(1), "copied")
            if segments.is_fixed:
                assert recorder.waited == (["copied"] if number == 2 else [])
        segments.end_step()
    assert recorder.waited == ["copied"]


def test_what_arrives_has_the_same_place_in_every_replay():
    segments = Segments(CpuRecorder())
    places = []
    for _ in range(WARM_UP + 3):
        segments.begin_step()
        places.append(segments.room(("box", 0), lambda: torch.zeros(2)))
        segments.end_step()
    assert len({id(place) for place in places[: WARM_UP + 1]}) == WARM_UP + 1
    assert places[WARM_UP] is places[WARM_UP + 1] is places[WARM_UP + 2]


def test_what_was_copied_to_a_room_is_kept_until_nothing_is_recorded_any_more():
    segments, alive = Segments(CpuRecorder()), []
    for _ in range(WARM_UP + 2):
        segments.begin_step()
        source = torch.zeros(2)
        seen = weakref.ref(source)
        segments.keep(source)
        del source
        alive.append(seen() is not None)
        segments.end_step()
        assert seen() is None
    assert alive == [False] * WARM_UP + [True, False]


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.mark.parametrize("ends", [CudaRecorder.end, CudaRecorder.abort])
def test_lanes_record_one_after_the_other(ends, monkeypatch):
    noted = []

    class Graph:
        def capture_begin(self, **_):
            noted.append("begin")

        def capture_end(self):
            noted.append("end")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: SimpleNamespace(id=(0, 1)))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    one, other = (CudaRecorder(torch.device("cuda:0"), None) for _ in range(2))
    one.begin()
    second = threading.Thread(target=lambda: (other.begin(), other.end()))
    second.start()
    second.join(0.2)
    assert noted == ["begin"]
    ends(one)
    second.join(10)
    assert noted == ["begin", "end"] * 2


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("cuda:0", "cpu:0"), [0]),
        (("cuda:0/0-87", "cuda:0/88-131"), [0, 1]),  # each has a lane
        (("cuda:0", "cuda:1"), []),  # both have one
    ],
)
def test_a_lane_is_recorded_that_works_for_one_gpu_or_share(names, expected, box):  # noqa: F811
    module, inputs, given = step_of("tiny-gpt2")
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, box)
    timeline = pw.simulate(problem, random_placement(problem, 0))
    devices = [RealDevice(name, name.split(":")[0], ()) for name in names]
    made = program.compile_program(
        step,
        timeline.candidate.placement.tolist(),
        sequence_of(timeline),
        devices,
        whole_step(step),
    )
    assert sorted(made.recorded) == expected


def handed_over(source):
    """What a lane's function leaves for others (True) and waits for (False), by number."""
    calls = re.findall(r"\b(send|signal|lend|receive|wait|hold)\((\d+)", source)
    return [(call in ("send", "signal", "lend"), int(number)) for call, number in calls]


@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-resnet"])
@pytest.mark.parametrize("seed", range(3))
def test_a_gpu_lends_its_parameters_between_segments(name, seed, box):  # noqa: F811
    module, inputs, given = step_of(name)
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, box)
    timeline = pw.simulate(problem, random_placement(problem, seed))
    devices = [RealDevice(name, name.split(":")[0], ()) for name in ("cuda:0", "cpu:0")]
    placement = timeline.candidate.placement.tolist()
    made = program.compile_program(
        step, placement, sequence_of(timeline), devices, whole_step(step)
    )
    [sources] = made.sources
    fetched = {
        (tensor, target)
        for tensor, target in zip(timeline.transfers.tensor, timeline.transfers.target, strict=True)
        if step.graph.tensor_is_resident[tensor] and target == 1 and step.graph.tensor_bytes[tensor]
    }
    lent = re.findall(r"^( *)lend\((\d+)", sources[0], re.MULTILINE)
    assert len(lent) == len(fetched) > 0
    assert {len(indent) for indent, _ in lent} == {4}  # not inside what is recorded
    assert "fetch(" in sources[0]
    assert "fetch(" not in sources[1]
    # Whoever may go on does, until all lanes are at their ends.
    left = {lane: handed_over(source) for lane, source in sources.items()}
    there: set[int] = set()
    while any(left.values()):
        before = sum(map(len, left.values()))
        for calls in left.values():
            while calls and (calls[0][0] or calls[0][1] in there):
                is_left, number = calls.pop(0)
                there |= {number} if is_left else set()
        assert sum(map(len, left.values())) < before, "lanes wait for each other"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@needs_compiler
def test_compiled_segments_give_the_same_up_to_rounding(box):  # noqa: F811
    module, inputs, given = step_of("tiny-gpt2")
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, box)
    halves = (np.arange(problem.num_ops) > problem.num_ops // 2).astype(np.int64)
    halves[problem.colocation_members] = halves[problem.colocation_leaders]
    timeline = pw.simulate(problem, halves)
    fed = [*inputs, *given["targets"]]
    plain, _ = run_steps(step, module, timeline, fed)
    found, _ = run_steps(step, module, timeline, fed, compiles=True)
    for one, other in zip(found, plain, strict=True):
        assert_same(one, other, 1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@needs_compiler
def test_a_compiled_module_trains_as_before_up_to_rounding(box):  # noqa: F811
    module, inputs, given = step_of("tiny-gpt2")
    graph = pw.capture(module, inputs, **given).graph
    problem = pw.Problem(graph, box)
    timeline = pw.simulate(problem, np.zeros(problem.num_ops, dtype=np.int64))
    plan = pw.Plan.of(timeline, "test", lower_bound_s=0.0, placer="none")
    plain = copy.deepcopy(module)
    placed = pw.apply(plan, module, inputs, **given, compiles=True)
    for each in (plain, placed):
        given["loss"](each(*inputs), *given["targets"]).backward()
    pairs = zip(placed.parameters(), plain.parameters(), strict=True)
    assert_same(*zip(*((x.grad, y.grad) for x, y in pairs), strict=True), 1e-4)


# --- On a GPU. ---


@pytest.fixture
def gpu_box(tmp_path):
    (tmp_path / "box.toml").write_text(BOX.format(names=["cpu"], more=GPU))
    return pw.Cluster.load(tmp_path / "box.toml")


@pytest.fixture
def deterministic(monkeypatch):
    """Have a GPU add in the same order every time."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # where nothing deterministic is known
@on_gpu
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("name", TINY)
def test_cuda_graphs_give_what_plain_calls_give(name, seed, gpu_box, deterministic):
    check_graphs(name, seed, gpu_box)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@on_gpu
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["tiny-gpt2", "tiny-resnet", "tiny-nmt"])
def test_cuda_graphs_of_shares_give_what_plain_calls_give(name, seed, tmp_path, deterministic):
    last = count_multiprocessors("cuda:0") - 1
    shares = GPU.replace('name = "cuda:0"', f'names = ["cuda:0/0-31", "cuda:0/32-{last}"]')
    (tmp_path / "box.toml").write_text(BOX.format(names=["cpu:0"], more=shares))
    check_graphs(name, seed, pw.Cluster.load(tmp_path / "box.toml"))


def check_graphs(name, seed, box):  # noqa: F811
    """Hold several steps equal to those without graphs, to the bit."""
    module, inputs, given = step_of(name)
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, box)
    placement = np.ones(problem.num_ops, dtype=np.int64)
    if seed is not None:
        placement = random_placement(problem, seed)
    timeline = pw.simulate(problem, placement)
    fed = [*inputs, *given["targets"]]
    plain, _ = run_steps(step, module, timeline, fed, graphs=False)
    found, _ = run_steps(step, module, timeline, fed)
    assert len(found) == NUM_STEPS
    for one, other in zip(found, plain, strict=True):
        assert_same(one, other)


@pytest.mark.gpu
@on_gpu
def test_a_step_on_a_gpu_is_one_graph_and_memory_is_given_back(gpu_box):
    module, inputs, given = step_of("tiny-gpt2")
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, gpu_box)
    timeline = pw.simulate(problem, np.ones(problem.num_ops, dtype=np.int64))
    left = []
    for _ in range(2):
        placed = PlacedStep.of_timeline(step, copy.deepcopy(module), timeline)
        assert [*placed.runner.program.recorded.values()] == [1]
        for _ in range(NUM_STEPS):
            placed.run([*inputs, *given["targets"]])
        placed.close()
        del placed
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_reserved())
    assert left[1] <= left[0]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@on_gpu
def test_compiled_segments_on_a_gpu_give_the_same_up_to_rounding(gpu_box):
    module, inputs, given = step_of("tiny-gpt2")
    step = pw.capture(module, inputs, **given)
    problem = pw.Problem(step.graph, gpu_box)
    timeline = pw.simulate(problem, np.ones(problem.num_ops, dtype=np.int64))
    fed = [*inputs, *given["targets"]]
    plain, _ = run_steps(step, module, timeline, fed, graphs=False)
    found, _ = run_steps(step, module, timeline, fed, compiles=True)
    for one, other in zip(found, plain, strict=True):
        assert_same(one, other, 1e-3)
