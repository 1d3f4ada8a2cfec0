from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from placewright.bench import ablations, pool, published, running, table1, table2, testbeds
from placewright.bench.cells import Answer, Book, Cell, Effort, Machine, Outcome, Point, thin
from placewright.bench.summary import Summary, ran_on, verdict
from placewright.bench.tables import Table, to_markdown, write_markdown
from placewright.bench.worker import failure_of, run_cell
from placewright.cli import app
from placewright.errors import InputError
from placewright.load import load_model, load_problem
from placewright.placing import PLACERS, place

GIB = 2**30
MACHINE = Machine("a CPU", 2, "0.1", "2.9")
ONE_MODEL = ["--only", "inception-v3-b1", "--clusters", "k40", "--budget", "100 samples"]


def cell(placer="annealing", seed=0, model="tiny-nmt", cluster="k40x2", **more):
    fields = {"bench": "table1", "budget": "20s, 60 samples", **more}
    return Cell(model=model, cluster=cluster, placer=placer, seed=seed, **fields)


def answered(which, objective_s, overflow_bytes=0, wall_s=600.0, samples=1000, bound_s=0.25):
    answer = Answer(
        objective_s=objective_s,
        is_feasible=overflow_bytes == 0,
        overflow_bytes=overflow_bytes,
        wall_s=wall_s,
        samples=samples,
        samples_per_s=samples / wall_s,
        lower_bound_s=bound_s,
        num_devices=2,
        history=[Point(0.1, 1, objective_s, overflow_bytes)],
    )
    return Outcome(cell=which, answer=answer, reason="", machine=MACHINE)


def failed(which, failure="crash", reason="It broke."):
    return Outcome(cell=which, failure=failure, reason=reason, machine=MACHINE)


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


# Cells, in processes of their own.


def test_a_cell_comes_to_what_place_comes_to():
    which = cell(seed=3)
    (outcome,) = pool.run_cells([which], jobs=1, threads=1)
    here = place(
        load_problem(load_model("tiny-nmt"), "k40x2"), "annealing", budget="60 samples", seed=3
    )
    answer = outcome.answer
    assert outcome.cell == which
    assert outcome.failure == ""
    assert answer.objective_s == here.objective_s
    assert answer.is_feasible
    assert answer.samples == here.samples == 60
    assert answer.samples_per_s == pytest.approx(60 / answer.wall_s)
    assert 0 < answer.lower_bound_s == here.lower_bound_s <= answer.objective_s
    assert answer.num_devices >= 1
    assert answer.history[-1].objective_s == here.objective_s
    assert outcome.machine.threads == 1
    assert outcome.machine.cpu
    assert outcome.machine.placewright.startswith("0.")


def test_cells_run_at_once_and_what_cannot_run_is_an_outcome():
    if pool.num_cores() < 2:
        pytest.skip("needs two cores")
    cells = [
        cell("one-gpu", cluster="k40x2-tight"),
        cell("magic"),
        cell(model="no-such-model"),
    ]
    with closing(pool.run_cells(cells, jobs=2, threads=1)) as outcomes:
        found = {outcome.cell.key: outcome for outcome in outcomes}
    tight, magic, model = (found[which.key] for which in cells)
    assert not tight.answer.is_feasible
    assert tight.answer.overflow_bytes > 0
    assert magic.failure == model.failure == "input"
    assert magic.reason.startswith("There is no placer `magic`.")
    assert model.reason.startswith("There is no model `no-such-model`.")


def test_a_cell_that_takes_too_long_is_killed_and_recorded(monkeypatch):
    monkeypatch.setattr(pool, "GRACE_S", 0.1)
    (outcome,) = pool.run_cells([cell(budget="0.1s")], jobs=1, threads=1)
    assert outcome.failure == "time"
    assert outcome.reason == "It was still running after 0.3 s and was killed."


def test_a_cell_without_memory_is_recorded(monkeypatch):
    monkeypatch.setattr(pool, "_memory_bytes", lambda: 1000)
    (outcome,) = pool.run_cells([cell()], jobs=1, threads=1)
    assert outcome.failure == "memory"
    assert "Memory" in outcome.reason or "memory" in outcome.reason


def start(tmp_path, *options):
    """Run a bench whose first cell would take a minute, and wait for its worker."""
    command = [sys.executable, "-m", "placewright.cli", "bench", "table1", *ONE_MODEL[:-1], "60s"]
    command += ["--out", str(tmp_path), "--seeds", "1", "--placers", "annealing,auto", *options]
    bench = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    return bench, wait_for_worker(bench)


def wait_for_worker(bench, other_than=0):
    for _ in range(600):
        for path in Path("/proc").glob("[0-9]*/stat"):
            pid = int(path.parent.name)
            try:
                parent = int(path.read_text().rpartition(")")[2].split()[1])
                command = path.with_name("cmdline").read_text()
            except OSError:
                continue
            if parent == bench.pid and "bench.worker" in command and pid != other_than:
                return pid
        assert bench.poll() is None, bench.communicate()
        time.sleep(0.05)
    raise AssertionError("no worker was started")


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for_end(pid):
    for _ in range(200):
        if not is_alive(pid):
            return True
        time.sleep(0.05)
    return False


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc")


@needs_proc
def test_a_worker_that_is_killed_is_a_row_and_the_bench_goes_on(tmp_path):
    bench, worker = start(tmp_path)
    os.kill(worker, signal.SIGKILL)
    second = wait_for_worker(bench, other_than=worker)
    os.kill(second, signal.SIGSEGV)
    said = bench.communicate(timeout=60)
    rows = [*Book(tmp_path).read().values()]
    assert [row.failure for row in rows] == ["memory", "crash"]
    assert rows[0].reason == "Its process was killed from outside, as when memory runs out."
    assert rows[1].reason == "Its process ended by SIGSEGV."
    assert "[1/2] inception-v3-b1@k40x2 annealing seed 0: failed (memory)" in said[1]
    assert "about 2 min left" in said[1]
    assert "[2/2]" in said[1]
    assert "Failed: annealing, 1 cell: Its process was killed" in " ".join(said[0].split())
    assert bench.returncode == 0


@needs_proc
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_bench_that_is_stopped_leaves_no_process(tmp_path, how):
    bench, worker = start(tmp_path)
    bench.send_signal(how)
    said = bench.communicate(timeout=60)[1]
    assert wait_for_end(worker)
    if how == signal.SIGINT:
        assert bench.returncode == 130
        assert said == f"Stopped. What is done is in {tmp_path / 'cells.jsonl'}.\n"
    assert Book(tmp_path).read() == {}


def test_cores_are_shared_and_no_more_than_there_are():
    parts = pool._share_cores(1, 1)
    assert [len(part) for part in parts] == [1]
    with pytest.raises(InputError, match="`--jobs 1000` with `--threads 3` need 3000 cores"):
        [*pool.run_cells([cell()], jobs=1000, threads=3)]


def test_memory_is_told_from_other_errors():
    assert failure_of("numpy._core._exceptions._ArrayMemoryError: Unable to allocate") == "memory"
    assert failure_of("RuntimeError: DefaultCPUAllocator: can't allocate memory") == "memory"
    assert failure_of("RuntimeError: something else") == "crash"


def test_an_error_in_a_placer_is_an_outcome(monkeypatch):
    def break_down(run):
        raise ZeroDivisionError("no devices")

    monkeypatch.setitem(PLACERS, "broken", break_down)
    outcome = run_cell(cell("broken"), threads=2)
    assert (outcome.failure, outcome.reason) == ("crash", "ZeroDivisionError: no devices")


def test_a_policy_that_is_too_large_fails_for_memory():
    outcome = run_cell(cell("hierarchical", options={"hidden": 10**8}), threads=2)
    assert outcome.failure == "memory"
    assert outcome.reason.startswith("Training this policy would take more than 1,000 TiB")


# The book.


def test_a_rerun_skips_what_is_done_and_retries_failures_if_asked(tmp_path):
    bench = running.Bench(
        (testbeds.Testbed("tiny-nmt", "k40x2"),),
        table1.PLACERS,
        Effort("20s, 60 samples", 2),
        table1.QUICK,
        table1.plan,
        table1.tables,
    )
    choice = running.Choice(placers=["one-gpu", "annealing"])
    book, said = Book(tmp_path / "new"), []
    book.open()
    cells = running.cells_to_run(bench, choice, book.read())
    assert [(c.placer, c.seed) for c in cells] == [
        ("one-gpu", 0),
        ("annealing", 0),
        ("annealing", 1),
    ]
    running.run_bench(cells[:2], book, 1, 1, said.append)
    assert said[0].startswith("[1/2] tiny-nmt@k40x2 one-gpu seed 0: 0.00")
    assert said[0].endswith("about 1 min left")
    assert said[1].endswith("; done")
    assert [c.seed for c in running.cells_to_run(bench, choice, book.read())] == [1]
    book.append(failed(cells[2]))
    assert running.cells_to_run(bench, choice, book.read()) == []
    assert running.cells_to_run(bench, choice, book.read(), is_retry=True) == [cells[2]]
    book.append(answered(cells[2], 1.0))
    assert book.read()[cells[2].key].failure == ""


def test_a_line_is_written_as_it_is_read_back(tmp_path):
    book = Book(tmp_path)
    outcome = answered(cell(options={"failures_ignored_after": None, "entropy": 0.5}), 0.5)
    book.append(outcome)
    book.append(failed(cell(seed=1)))
    assert [*book.read().values()] == [outcome, failed(cell(seed=1))]
    line = json.loads((tmp_path / "cells.jsonl").read_text().splitlines()[0])
    assert line["answer"]["history"] == [[0.1, 1, 0.5, 0]]
    assert line["cell"]["options"] == {"failures_ignored_after": None, "entropy": 0.5}


def test_a_line_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path, monkeypatch):
    book = Book(tmp_path)
    book.append(failed(cell()))
    write = os.write
    monkeypatch.setattr(os, "write", lambda file, data: write(file, data[:10]))
    with pytest.raises(InputError, match=r"cells.jsonl` cannot be written: No space left"):
        book.append(failed(cell(seed=1)))
    assert len(book.read()) == 1


def test_options_in_another_order_are_the_same_cell():
    assert cell(options={"a": 1, "b": 2}).key == cell(options={"b": 2, "a": 1}).key
    assert cell(options={"a": 1}).key != cell(options={"a": 1.5}).key


def test_a_long_history_is_thinned_between_its_ends():
    points = [Point(float(k), k, 1.0 / (k + 1), 0) for k in range(1000)]
    kept = thin(points)
    assert len(kept) == 60
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert kept == sorted(
        {point.samples: point for point in kept}.values(), key=lambda p: p.samples
    )
    assert thin(points[:7]) == points[:7]


# Choices.


def test_testbeds_are_those_of_both_papers_and_their_tight_forms():
    names = [str(bed) for bed in table1.TESTBEDS]
    assert len(names) == 24
    assert "nmt-8@k40x8" in names
    assert "inception-v3@k80x4-tight" in names


@pytest.mark.parametrize(
    ("models", "clusters", "count"),
    [
        (None, None, 24),
        (["nmt-2"], None, 6),
        (["nmt-2"], ["k40"], 1),
        (["nmt-2"], ["k80x2", "k80-tight"], 3),
        (None, ["tight"], 12),
        (None, ["k40x4-tight"], 1),
    ],
)
def test_testbeds_are_chosen_by_model_and_cluster(models, clusters, count):
    assert len(testbeds.choose(table1.TESTBEDS, models, clusters)) == count


def test_the_first_seed_of_everything_comes_first():
    for bench in (running.BENCHES["table1"], running.BENCHES["table2"]):
        cells = running.plan_cells(bench, running.Choice())
        assert [c.seed for c in cells] == sorted(c.seed for c in cells)
        assert len({c.key for c in cells}) == len(cells)
    assert (
        len(running.plan_cells(running.BENCHES["table1"], running.Choice(is_quick=True))) == 14 * 11
    )
    assert len(running.plan_cells(running.BENCHES["table1"], running.Choice())) == 24 * (4 + 7 * 3)
    assert len(cells) == 6 * (2 * (3 + 20 + 1) + 3)  # the layers' arm is one placer's


def test_a_budget_without_seconds_gets_the_benchs_own():
    def budget(text, name="table2"):
        return running.plan_cells(running.BENCHES[name], running.Choice(budget=text))[0].budget

    assert budget("70 samples") == "600s, 70 samples"
    assert budget("2min, 70 samples") == "120s, 70 samples"
    assert budget(None) == "600s, 5000 samples"


# Ablations.


def test_ablations_change_one_thing_and_run_the_base_once():
    cells = running.plan_cells(running.BENCHES["ablations"], running.Choice(num_seeds=1))
    assert len({c.key for c in cells}) == len(cells)
    plain = [c for c in cells if c.cluster == "k40x2" and c.model == "nmt-2"]
    assert sum(not c.options for c in plain) == 1
    assert sum(c.options == {"cycle_samples": 2000} for c in plain) == 1  # hierarchical-plus's base
    assert {"reward": "log1p"} in [c.options for c in plain]
    assert {"reward": "sqrt"} not in [c.options for c in plain]
    assert {"num_groups": 256} not in [c.options for c in plain]
    assert not any("fit" in c.options for c in plain)
    tight = [c for c in cells if c.cluster == "k40x2-tight"]
    assert {"fit": "mask"} in [c.options for c in tight]
    assert not any("reward" in c.options for c in tight)


# Tables.


def test_table_1_sets_our_ratios_beside_the_published_ones():
    bed = {"model": "nmt-2", "cluster": "k40x2"}
    outcomes = [
        answered(cell("one-gpu", **bed), 0.8, 2 * GIB, 0.001, 1),
        answered(cell("expert-paper", **bed), 0.5, 0, 0.5, 1),
        answered(cell("expert-strong", **bed), 0.4, 0, 1.234, 7),
        *(answered(cell("hierarchical", s, **bed), t) for s, t in enumerate((0.3, 0.2, 0.5))),
        answered(cell("auto", 0, **bed), 0.3, GIB),
        answered(cell("auto", 1, **bed), 0.31),
        failed(cell("auto", 2, **bed)),
    ]
    overview, table = table1.tables(outcomes)
    assert overview.rows == (
        ("nmt-2", "k40x2", "–", "no fit", "1.250", "–", "–", "–", "0.750", "–", "–", "no fit"),
    )
    assert table.title == "Table 1 of the Hierarchical Planner (K40s), simulated"
    assert {row[:2] for row in table.rows} == {("nmt-2", "k40x2")}
    assert [row[2:] for row in table.rows] == [
        ("one-gpu", "0.2500", "does not fit (2.00 GiB over)", "<0.01", "", "", "out of memory"),
        ("expert-paper", "0.2500", "0.5000", "0.50", "1.000", "1.250", "1.00"),
        ("expert-strong", "0.2500", "0.4000", "1.23", "0.800", "1.000", ""),
        ("hierarchical", "0.2500", "0.3000 (0.2000–0.5000)", "600", "0.600", "0.750", "0.39"),
        ("auto", "0.2500", "does not fit (1.00 GiB over), 1 of 3 fit", "600", "", "", ""),
    ]
    assert table.notes[-2:] == (
        "Ran on a CPU, 2 threads a cell.",
        "Failed: auto, 1 cell: It broke.",
    )


def test_thousandths_over_an_expert_are_shown():
    bed = {"model": "nmt-2", "cluster": "k40x2"}
    outcomes = [
        answered(cell("expert-strong", **bed), 1.0),
        answered(cell("auto", **bed), 1.003),
    ]
    overview, table = table1.tables(outcomes)
    assert overview.rows[0][-1] == "1.003"
    assert [row[-2] for row in table.rows] == ["1.000", "1.003"]


def elsewhere(outcome, cpu="another CPU", threads=1):
    return msgspec.structs.replace(outcome, machine=Machine(cpu, threads, "0.1", "2.8"))


def test_cells_that_ran_on_one_processor_say_which():
    assert ran_on([]) == []
    here = [answered(cell("auto"), 0.5), failed(cell("heft"))]
    assert ran_on(here) == ["Ran on a CPU, 2 threads a cell."]
    assert ran_on([elsewhere(here[0])]) == ["Ran on another CPU, 1 thread a cell."]


def test_cells_that_ran_on_several_processors_say_which_placers_did():
    outcomes = [
        answered(cell("auto"), 0.5),
        elsewhere(answered(cell("colocrl"), 0.6)),
        answered(cell("annealing"), 0.5),
        answered(cell("colocrl", 1), 0.6),
        elsewhere(failed(cell("colocrl", 2))),
        elsewhere(answered(cell("scotch"), 0.7), "a CPU"),
    ]
    assert ran_on(outcomes) == [
        "Ran on a CPU, 2 threads a cell: auto, annealing, colocrl (1 of 3 cells);"
        " on another CPU, 1 thread a cell: colocrl (2 of 3 cells);"
        " on a CPU, 1 thread a cell: scotch."
    ]


@pytest.mark.parametrize("name", ["table1", "table2", "ablations"])
def test_tables_say_below_where_their_cells_ran(name):
    bench = running.BENCHES[name]
    choice = running.Choice(models=["nmt-2"])
    cells = running.plan_cells(bench, choice)
    done = {c.key: answered(c, 0.5) for c in cells}
    moved = bench.placers[-1]
    done |= {key: elsewhere(o) for key, o in done.items() if o.cell.placer == moved}
    first, *others = running.make_tables(bench, choice, done)
    assert first.notes[-2].endswith("a cell; placewright 0.1, torch 2.9 and 2.8.")
    assert first.notes[-1].startswith("Ran on a CPU, 2 threads a cell: ")
    assert first.notes[-1].endswith(f"; on another CPU, 1 thread a cell: {moved}.")
    if name == "table1":
        assert all(any(note.startswith("Ran on") for note in t.notes) for t in others)


def test_tight_testbeds_have_no_published_column():
    bed = {"model": "nmt-2", "cluster": "k40x2-tight"}
    outcomes = [
        answered(cell("expert-strong", **bed), 0.6, GIB),
        answered(cell("auto", **bed), 0.8),
    ]
    overview, table = table1.tables(outcomes)
    assert overview.rows[0][-1] == "fits"
    assert table.columns[-1] == "over expert-strong"
    assert [row[-1] for row in table.rows] == ["", ""]
    assert "simulated" in overview.title
    assert "simulated" in table.title


def grouped(grouping, seed, placer="hierarchical", model="nmt-4", cluster="k40x4"):
    return cell(
        placer, seed, model, cluster,
        bench="table2", options=table2._ARMS[grouping], budget="600s, 1000 samples",
    )  # fmt: skip


def test_table_2_compares_groupings():
    outcomes = [
        *(answered(grouped("learned", s), t) for s, t in enumerate((0.5, 0.4, 0.45))),
        *(answered(grouped("random", s), t) for s, t in enumerate((0.9, 0.6, 0.7, 0.8))),
        answered(grouped("none", 0), 0.9),
    ]
    groupings, none = table2.tables(outcomes)
    assert groupings.rows == (
        ("nmt-4", "k40x4", "hierarchical", "1,000", "0.4500 (0.4000–0.5000)", "", "0.6000",
         "0.7500", "0.9000", "25.0%", "3.20 / 3.42 / 6.91", "47.2%"),
    )  # fmt: skip
    assert none.rows == (
        ("nmt-4", "k40x4", "hierarchical", "quality: 2.00 times the learned grouping's step time",
         "0.9000", "1,000"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (
            answered(grouped("none", 0), 0.9, samples=12),
            "time: 12 of 1,000 samples in 600 s; 2.00 times the learned grouping's step time",
        ),
        (
            answered(grouped("none", 0), 0.4),
            "no failure: 0.89 times the learned grouping's step time",
        ),
        (answered(grouped("none", 0), 0.4, GIB), "quality: found nothing that fits"),
        (
            failed(grouped("none", 0), "memory", "MemoryError: too much."),
            "memory: MemoryError: too much",
        ),
        (failed(grouped("none", 0), "time", "It was killed."), "time: It was killed"),
    ],
)
def test_no_grouping_says_how_it_fails(outcome, words):
    _, none = table2.tables([answered(grouped("learned", 0), 0.45), outcome])
    assert none.rows[0][3] == words


def test_random_groupings_that_do_not_fit_are_counted():
    outcomes = [answered(grouped("random", s), 0.5, over) for s, over in enumerate((0, 0, GIB))]
    groupings, _ = table2.tables([*outcomes, answered(grouped("learned", 0), 0.4, samples=7)])
    assert groupings.rows[0][3:9] == (
        "7 of 1,000",
        "0.4000",
        "",
        "0.5000",
        "0.5000",
        "1 do not fit or failed",
    )


def changed(options, times):
    common = {"bench": "ablations", "model": "nmt-2", "cluster": "k40x2", "options": options}
    return [answered(cell("hierarchical", s, **common), t) for s, t in enumerate(times)]


def test_ablations_say_what_is_seed_noise():
    base = (0.50, 0.51, 0.52, 0.53, 0.54)
    (table,) = ablations.tables(
        [
            *changed({}, base),
            *changed({"reward": "log1p"}, (0.40, 0.41, 0.42, 0.43, 0.44)),
            *changed({"reward": "identity"}, (0.505, 0.515, 0.525, 0.50, 0.54)),
            *changed({"baseline": "none"}, (0.60, 0.61, 0.62, 0.63, 0.64)),
        ]
    )
    assert table.title == "Ablations of hierarchical: nmt-2 on k40x2, simulated"
    bases = [row[0] for row in table.rows if row[1] == "the base"]
    assert {"reward=sqrt", "baseline=moving-average", "num_groups=256"} <= {*bases}
    assert [row for row in table.rows if row[1] != "the base"] == [
        ("none (the base)", "0.5200 (0.5000–0.5400)", "", ""),
        ("reward=identity", "0.5150 (0.5000–0.5400)", "0.99", "seed noise (p 0.83)"),
        ("reward=log1p", "0.4200 (0.4000–0.4400)", "0.81", "faster (p 0.008)"),
        ("baseline=none", "0.6200 (0.6000–0.6400)", "1.19", "slower (p 0.008)"),
    ]


def test_two_seeds_tell_nothing():
    ours, base = changed({}, (0.1, 0.2)), changed({}, (0.8, 0.9))
    assert verdict(Summary(tuple(ours)), Summary(tuple(base))) == "too few seeds to tell"


def test_what_does_not_fit_is_worse_than_what_is_slow():
    fits = changed({}, (9.0, 9.1, 9.2, 9.3, 9.4))
    over = [answered(cell(seed=s), 0.1, GIB) for s in range(5)]
    assert verdict(Summary(tuple(over)), Summary(tuple(fits))) == "slower (p 0.008)"


def test_published_figures_agree_with_each_other():
    rows = {row.model: row for row in published.TABLE_1}
    for row in published.TABLE_2:
        learned_s = rows[row.model].planner_s
        assert 1 - learned_s / row.best_s == pytest.approx(row.improvement, abs=0.005)


TABLE = Table(
    title="T, simulated", columns=("a", "b"), num_text=1, rows=(("x|y", "1"),), notes=("n",)
)
MARKDOWN = "### T, simulated\n\n| a | b |\n|---|---:|\n| x&#124;y | 1 |\n\n- n"


def test_markdown_goes_between_markers_and_leaves_the_rest(tmp_path):
    path = tmp_path / "results.md"
    assert to_markdown([TABLE]) == MARKDOWN
    write_markdown(path, "table1", [TABLE])
    assert path.read_text() == f"<!-- table1 -->\n\n{MARKDOWN}\n\n<!-- /table1 -->\n"
    path.write_text("# Title\n<!-- table1 -->old<!-- /table1 -->\nend\n")
    write_markdown(path, "table1", [TABLE])
    section = f"<!-- table1 -->\n\n{MARKDOWN}\n\n<!-- /table1 -->"
    assert path.read_text() == f"# Title\n{section}\nend\n"
    write_markdown(path, "table2", [TABLE])
    assert path.read_text().startswith(f"# Title\n{section}\nend\n\n<!-- table2 -->\n")
    path.write_text("<!-- /table1 -->")
    with pytest.raises(InputError, match="has one of `<!-- table1 -->` and `<!-- /table1 -->`"):
        write_markdown(path, "table1", [TABLE])


# The command line.


def test_a_bench_runs_resumes_and_writes_its_tables(tmp_path):
    arguments = [
        "table1",
        *ONE_MODEL,
        "--quick",
        "--out",
        tmp_path / "out",
        "--markdown",
        tmp_path / "r.md",
    ]
    result = run(*arguments, "--placers", "expert-strong")
    assert result.exit_code == 0
    assert "Step time over expert-strong's, simulated" in result.stdout
    assert "[1/1] inception-v3-b1@k40x2 expert-strong seed 0" in result.stderr
    again = run(*arguments, "--placers", "expert-strong,one-gpu")
    assert "[1/1] inception-v3-b1@k40x2 one-gpu seed 0" in again.stderr
    shown = run(*arguments, "--render-only")
    assert shown.stderr == ""
    assert shown.stdout == again.stdout
    assert "Unfinished: 2 of 11 cells are done." in " ".join(shown.stdout.split())
    assert (
        "| inception-v3-b1 | k40x2 | one-gpu | 0.0343 | 0.0663 |" in (tmp_path / "r.md").read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["table1", "--only", "gpt5"], "This bench has no model `gpt5`. It has: inception-v3,"),
        (["table1", "--clusters", "k41"], "This bench has no cluster `k41`. It has: k40,"),
        (
            ["table1", "--only", "nmt-8", "--clusters", "k80"],
            "No testbed has one of the models nmt-8",
        ),
        (["table1", "--placers", "magic"], "This bench has no placer `magic`. It has: cpu-only,"),
        (["table1", "--budget", "soon"], "`budget` is 'soon'"),
        (["table1", "--quick", "--jobs", "5000"], "need 5000 cores; there are"),
        (["table1", "--render-only", "--out", "nowhere"], "There is no file of cells at `nowhere"),
        (["table1", "--out", "/proc/nothing"], "`/proc/nothing/cells.jsonl` cannot be written: "),
    ],
)
def test_wrong_input_gets_one_sentence(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.startswith("placewright: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


@pytest.mark.parametrize("line", [b"{", b"[]", b'{"cell": 3}', b"\xff"])
def test_a_broken_line_is_named(tmp_path, line):
    good = msgspec.json.encode(failed(cell())) + b"\n"
    (tmp_path / "cells.jsonl").write_bytes(good + good + line + b"\n" + good)
    result = run("table1", "--out", tmp_path)
    assert result.exit_code == 2
    assert f"Line 3 of `{tmp_path / 'cells.jsonl'}` is no cell: " in result.stderr
    assert result.stderr.count("\n") == 1


def test_nothing_to_render_is_said(tmp_path):
    (tmp_path / "cells.jsonl").write_bytes(b"")
    result = run("table1", "--render-only", "--out", tmp_path)
    assert result.exit_code == 2
    assert "None of the 600 cells asked for is done." in result.stderr
