"""The kernel against the reference, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placewright.simulator import default_triggers, simulate, simulate_many

from . import reference, worlds


@st.composite
def cases(draw, max_ops=12):
    problem = draw(worlds.problems(max_ops))
    placement = draw(worlds.placements(problem))
    discipline = draw(st.sampled_from(("fifo", "fifo", "program", "priority")))
    priorities = None
    if discipline == "priority":
        priorities = [draw(st.integers(-2, 2)) for _ in range(problem.num_ops)]
    triggers = None
    defaults = reference.Reference(problem, placement).default_triggers()
    if defaults and draw(st.booleans()):
        triggers = {
            fetch: draw(st.sampled_from(possible_triggers(problem, placement, *fetch)))
            for fetch in defaults
            if draw(st.booleans())
        }
    return problem, placement, discipline, priorities, triggers


def possible_triggers(problem, placement, tensor, device):
    graph = problem.graph
    first = min(
        i
        for t, i in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True)
        if t == tensor and placement[i] == device
    )
    ops = [i for i in range(first) if placement[i] == device and not graph.op_is_resident[i]]
    return [-1, *ops]


def assert_equal(timeline, expected):
    num_ops = timeline.problem.num_ops
    assert timeline.op_start_ps.tolist() == [expected.op_start[i] for i in range(num_ops)]
    assert timeline.op_end_ps.tolist() == [expected.op_end[i] for i in range(num_ops)]
    moves = timeline.transfers
    assert list(
        zip(
            moves.tensor.tolist(),
            moves.source.tolist(),
            moves.target.tolist(),
            moves.start_ps.tolist(),
            moves.end_ps.tolist(),
            strict=True,
        )
    ) == [(x.tensor, x.source, x.target, x.start, x.end) for x in expected.transfers]
    assert timeline.makespan_ps == expected.makespan
    assert timeline.peak_bytes.tolist() == expected.peak
    assert timeline.triggers == expected.triggers
    assert timeline.sequence.tolist() == [
        i if kind == "op" else num_ops + i for kind, i in expected.sequence
    ]
    for device, levels in enumerate(expected.levels):
        assert_levels_equal(timeline, device, levels)


def assert_levels_equal(timeline, device, levels):
    here = timeline.level_device == device
    last = dict(
        zip(timeline.level_ps[here].tolist(), timeline.level_bytes[here].tolist(), strict=True)
    )
    now = 0
    for time in sorted(levels.keys() | last.keys()):
        now = last.get(time, now)
        assert now == levels.get(time, now)
    assert timeline.level_bytes[here].max(initial=0) == timeline.peak_bytes[device]


@given(cases())
@settings(max_examples=1500, deadline=None)
def test_kernel_and_reference_agree_on_everything(case):
    timeline = simulate(*case)
    assert_equal(timeline, reference.simulate(*case))


@given(cases(max_ops=40))
@settings(max_examples=100, deadline=None)
def test_kernel_and_reference_agree_on_larger_graphs(case):
    timeline = simulate(*case)
    assert_equal(timeline, reference.simulate(*case))


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_default_triggers_agree_for_any_window(data):
    problem = data.draw(worlds.problems())
    placement = data.draw(worlds.placements(problem))
    window = data.draw(st.sampled_from((None, 0, 3, 10, 100)))
    expected = reference.Reference(problem, placement).default_triggers(window)
    assert default_triggers(problem, placement, window) == expected


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_many_agrees_with_one_on_any_number_of_threads(data):
    problem = data.draw(worlds.problems())
    rows = np.stack([data.draw(worlds.placements(problem)) for _ in range(5)])
    discipline = data.draw(st.sampled_from(("fifo", "program", "priority")))
    each = [None] * len(rows)
    priorities = None
    if discipline == "priority":
        each = np.arange(rows.size).reshape(rows.shape) * 7 % 5
        is_shared = data.draw(st.booleans())
        priorities = each[0] if is_shared else each
        each = [each[0]] * len(rows) if is_shared else each
    single = [simulate(problem, row, discipline, p) for row, p in zip(rows, each, strict=True)]
    for threads in (1, 2, 5):
        batch = simulate_many(problem, rows, discipline, priorities, num_threads=threads)
        assert batch.makespan_s.tolist() == [t.makespan_s for t in single]
        assert batch.overflow_bytes.tolist() == [t.overflow_bytes for t in single]
        assert batch.peak_bytes.tolist() == [t.peak_bytes.tolist() for t in single]


@pytest.mark.slow
def test_the_compiled_loop_allocates_nothing(tmp_path):
    # Compiled afresh, since code from the cache cannot be looked at.
    script = """if True:
        import numpy as np
        from tests import tiny
        from placewright import _kernel, simulate
        simulate(tiny.streamed(), [0, 1, 0, 1, 0, 1, 0])
        [code] = _kernel.run_many.inspect_llvm().values()
        print([name for name in ("NRT_", "malloc", "calloc") if name in code])
    """
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
