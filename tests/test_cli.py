from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from placewright import placing
from placewright.cli import app
from placewright.graph import Graph
from placewright.graph_file import Op
from placewright.load import load_model
from placewright.plan import Plan

SIMULATE = ["simulate", "gpt2-small", "--cluster", "k40x4"]


@pytest.fixture(autouse=True, scope="module")
def _captured():
    """Have the model in the cache, so that no test is told that it is being captured."""
    load_model("gpt2-small")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_simulate_says_time_bound_memory_and_critical_path():
    result = run(*SIMULATE, "--on", "cpu")
    assert result.exit_code == 0
    assert "Simulated step time 39.76 s" in result.stdout
    assert "no placement takes less than" in result.stdout
    assert "10.54 GiB" in result.stdout
    assert "Critical path" in result.stdout


def test_simulate_gives_json():
    result = run(*SIMULATE, "--on", "cpu", "--json")
    facts = json.loads(result.stdout)
    assert facts["is_feasible"]
    assert facts["makespan_s"] == pytest.approx(39.76, abs=0.01)
    assert 0 < facts["lower_bound_s"] < facts["makespan_s"]
    assert facts["peak_bytes"]["cuda:0"] == 0


def test_what_does_not_fit_exits_with_1():
    result = run(*SIMULATE, "--on", "cuda:0", "--memory", "10GiB")
    assert result.exit_code == 1
    assert re.search(r"It does not fit: 55\d\.\d+ MiB more memory is needed\.", result.stdout)
    assert run(*SIMULATE, "--on", "cuda:0", "--memory", "10GiB", "--json").exit_code == 1
    assert run(*SIMULATE, "--on", "cuda:0").exit_code == 0


def test_a_plan_and_a_trace_can_be_saved_and_the_plan_simulated(tmp_path):
    plan, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    result = run(
        *SIMULATE, "--on", "cpu", "--discipline", "program", "--save", plan, "--trace", trace
    )
    assert result.exit_code == 0
    assert Plan.load(plan).discipline == "program"
    assert json.loads(trace.read_text())["traceEvents"]
    again = run(*SIMULATE, "--plan", plan, "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["name"] == "everything on cpu"


def test_a_bare_placement_can_be_simulated(tmp_path):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps(dict.fromkeys(load_model("gpt2-small").op_names, "cuda:1")))
    result = run(*SIMULATE, "--plan", path, "--json")
    assert json.loads(result.stdout)["device_utilisation"]["cuda:1"] == 1.0


def test_inspect_shows_the_model_and_each_device_by_itself():
    result = run("inspect", "gpt2-small", "--cluster", "laptop")
    assert result.exit_code == 0
    for words in (
        "762",
        "aten.mm",
        "head.mm",
        "optimiser state",
        "activations kept for backward",
        "heaviest chain",
        "all on cuda:0",
        "does not fit",
        "expert-strong",
        "both together",
    ):
        assert words in result.stdout
    facts = json.loads(run("inspect", "gpt2-small", "--cluster", "laptop", "--json").stdout)
    assert facts["num_ops"] == 762
    assert facts["parameter_bytes"] == 4 * 124_439_808
    assert facts["alone"]["cpu"]["is_feasible"]
    assert not facts["alone"]["cuda:0"]["is_feasible"]


PLACE = ["place", "tiny-nmt", "--cluster", "k40x2", "--budget", "300 samples"]


def test_place_says_how_good_the_answer_is_and_why(tmp_path):
    result = run(*PLACE, "-o", tmp_path / "run")
    assert result.exit_code == 0
    for words in ("placed by auto", "no placement takes less than", "Why: ", "history are in"):
        assert words in result.stdout
    again = run("simulate", "tiny-nmt", "--cluster", "k40x2", "--plan", tmp_path / "run/plan.json")
    assert again.exit_code == 0
    facts = json.loads(run(*PLACE, "--json").stdout)
    assert facts["placer"] == "auto"
    assert facts["is_feasible"]
    assert facts["makespan_s"] >= facts["lower_bound_s"]


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("9" * 5000 + " samples", "expected text such as `60s`"),
        ("nan", "`budget` is 'nan'; expected a number that is not negative"),
        ("inf", "`budget` is 'inf'; expected a number that is not negative"),
        ("-1s", "`budget` is '-1s'; expected a number that is not negative"),
        ("1e99s", "`seconds` is 1e+99; expected a finite number"),
    ],
)
def test_a_budget_that_never_ends_is_refused(budget, words):
    for command in ("place", "compare"):
        result = run(command, "tiny-nmt", "--cluster", "k40x2", "--budget", budget)
        assert result.exit_code == 2
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_an_unknown_objective_is_refused_with_those_there_are():
    result = run(*PLACE, "--objective", "troughput")
    assert result.exit_code == 2
    assert "throughput" in result.stderr


def test_ctrl_c_before_there_is_an_answer_says_so(monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setitem(placing.PLACERS, "interrupted", interrupted)
    result = run(*PLACE, "--placer", "interrupted")
    assert result.exit_code == 130
    assert result.stderr.endswith("placewright: Stopped before there was an answer.\n")


def test_threads_are_a_number_that_a_machine_may_have(tmp_path):
    for threads in ("-1", "0", "nan", "9" * 30):
        result = run("bench", "table1", "--out", tmp_path, "--threads", threads)
        assert result.exit_code == 2
        assert "--threads" in result.stderr


def test_what_cannot_be_placed_exits_with_1():
    result = run(*PLACE, "--memory", "1B", "--placer", "one-gpu")
    assert result.exit_code == 1
    assert "Why: " in result.stdout


def test_compare_shows_placers_side_by_side():
    options = ["--placers", "auto,one-gpu,heft,random", "--budget", "50 samples", "--seeds", "2"]
    result = run("compare", "tiny-gpt2", "--cluster", "k40x2", *options)
    assert result.exit_code == 0
    for words in ("auto", "heft", "balance", "moved", "planned"):
        assert words in result.stdout
    rows = json.loads(run("compare", "tiny-gpt2", "--cluster", "k40x2", *options, "--json").stdout)
    assert rows[0]["placer"] == "auto"
    assert {row["placer"] for row in rows} == {"auto", "one-gpu", "heft", "random"}


def test_capture_writes_a_graph_file_and_nothing_else(tmp_path):
    path = tmp_path / "m.graph.json.gz"
    assert run("capture", "tiny-gpt2", "-o", path).exit_code == 0
    assert Graph.load(path).name == "tiny-gpt2"
    result = run("capture", "tiny-gpt2", "-o", tmp_path / "model.py")
    assert result.exit_code == 2
    assert "is no name for a graph file" in result.stderr


def test_list_names_models_and_clusters():
    assert "gpt2-small" in run("list", "models").stdout
    clusters = json.loads(run("list", "clusters", "--json").stdout)
    assert {"k40x2", "k40x4", "k40x8", "k80x2", "k80x4", "a100x8", "h200", "edge"} <= {*clusters}
    assert "Where the figures come from" in run("list", "clusters").stdout
    assert "auto" in json.loads(run("list", "placers", "--json").stdout)
    assert "simulated annealing" in run("list", "placers").stdout


def test_the_version_is_shown():
    assert run("--version").stdout.startswith("placewright 0.")


def test_names_that_look_like_markup_are_printed_as_they_are(tmp_path):
    path = tmp_path / "m[bold].graph.json"
    Graph.build("[/x]", [Op(name="a[/b]", kind="[red]mm", flops=1e9)]).save(path)
    trace = tmp_path / "t[bold].json"
    result = run("simulate", path, "--cluster", "laptop", "--on", "cpu", "--trace", trace)
    assert result.exit_code == 0
    assert "[/x] on laptop" in result.stdout
    assert f"The timeline is in {trace}." in result.stdout
    assert "[red]mm" in run("inspect", path).stdout


def test_a_reader_that_goes_away_is_no_error():
    script = f"{sys.executable} -m placewright.cli list clusters | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("option", [[], ["--json"]])
def test_a_full_disk_gets_a_sentence(option):
    command = [sys.executable, "-m", "placewright.cli", "list", "models", *option]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "placewright: The result cannot be written: No space left on device.\n"


def test_without_a_place_for_compiled_code_it_still_runs(tmp_path):
    # As numba does when neither the package nor the user's cache directory can be written to.
    script = """if True:
        from numba.core import caching
        def nowhere(*_):
            raise RuntimeError("cannot cache function: no locator available")
        caching.FunctionCache.__init__ = nowhere
        from placewright import _kernel
        from placewright.grouping import _kernels
        for function in (_kernel.run_many, _kernels.merge_sole_consumers):
            print(type(function).__name__, type(function._cache).__name__)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["CPUDispatcher", "NullCache"] * 2


def test_help_teaches():
    assert "placewright list models" in run("--help").stdout
    assert "Everything on one GPU" in run("simulate", "--help").stdout
    for command in ("simulate", "inspect", "list"):
        assert run(command, "--help").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (SIMULATE, "with `--plan FILE`, `--on DEVICE` or `--baseline NAME`"),
        (
            [*SIMULATE, "--on", "cpu", "--plan", "x.json"],
            "with `--plan FILE`, `--on DEVICE` or `--baseline NAME`",
        ),
        ([*SIMULATE, "--on", "cpu", "--trace", "x", "--save", "x"], "both name `x`"),
        (["inspect", ""], "There is no model ``"),
        (["inspect", "x" * 5000], "There is no model"),
        (
            [*SIMULATE, "--on", "tpu"],
            "Cluster `k40x4` has no device `tpu`. Its devices are: cpu, cuda:0",
        ),
        ([*SIMULATE, "--plan", "none.json"], "There is no plan or placement file at `none.json`"),
        (
            ["simulate", "gpt5", "--cluster", "k40x4", "--on", "cpu"],
            "There is no model `gpt5`. Those that ship with placewright are: inception-v3",
        ),
        (
            ["simulate", "no.graph.json", "--cluster", "k40x4", "--on", "cpu"],
            "There is no graph file at",
        ),
        (
            ["simulate", "gpt2-small", "--cluster", "k41", "--on", "cpu"],
            "There is no cluster `k41`. Those that ship",
        ),
        (
            ["inspect", "gpt2-small", "--cluster", "no.toml"],
            "There is no cluster file at `no.toml`",
        ),
        (
            [*SIMULATE, "--on", "cpu", "--trace", "no/such/folder/t.json"],
            "`no/such/folder/t.json` cannot be written",
        ),
        (
            [*PLACE, "--placer", "hierarchical", "--set", "hidden=100000000"],
            "would take more than 1,000 TiB of memory, and this machine has",
        ),
    ],
)
def test_wrong_input_gets_one_sentence_and_exit_code_2(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert words in result.stderr
    assert result.stderr.startswith("placewright: ")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [["simulate"], ["list", "cats"], ["fly"], [*SIMULATE, "--colour", "red"]]
)
def test_wrong_usage_exits_with_2(arguments):
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\x1f\x8b broken", gzip.compress(b"{}", mtime=0)[:-4], b"[]"]
)
def test_a_broken_graph_file_never_shows_a_traceback(tmp_path, content):
    path = tmp_path / "m.graph.json"
    path.write_bytes(content)
    command = [sys.executable, "-m", "placewright.cli", "inspect", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert str(path) in done.stderr


def test_a_plan_brings_its_own_order(tmp_path):
    plan = tmp_path / "plan.json"
    run(*SIMULATE, "--on", "cpu", "--save", plan)
    result = run(*SIMULATE, "--plan", plan, "--discipline", "program")
    assert result.exit_code == 2
    assert "brings its own order" in result.stderr


def test_the_first_simulation_says_that_it_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-m", "placewright.cli", *SIMULATE, "--on", "cpu", "--json"]
    first = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "Compiling the simulator, once for this machine" in first.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stderr == ""
    assert again.stdout == first.stdout
