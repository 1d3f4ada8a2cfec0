"""The package's shape: who may import whom, and what importing it loads."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import placewright

SOURCE = Path(placewright.__file__).parent

# A module may import what is listed here, and nothing else of the package. docs/architecture.md
# shows the same as a picture.
MAY_IMPORT = {
    "errors": set(),
    "arguments": {"errors"},
    "files": {"errors"},
    "units": {"errors"},
    "graph_file": {"errors", "files"},
    "graph": {"arguments", "errors", "graph_file"},
    "cluster_file": {"errors", "files", "units"},
    "cluster": {"arguments", "cluster_file", "errors", "files", "units"},
    "costs": {"arguments", "errors", "graph", "cluster"},
    "problem": {"arguments", "errors", "graph", "cluster", "costs"},
    "_compiling": set(),
    "_kernel": {"_compiling"},
    "timeline": {"graph", "costs", "problem"},
    "_layout": {"graph", "costs", "problem", "_kernel"},
    "simulator": {
        "arguments", "errors", "graph", "costs", "problem", "timeline", "_kernel", "_layout",
    },
    "bounds": {"arguments", "graph", "costs", "problem"},
    "coarsening": {"arguments", "errors", "graph", "costs", "problem"},
    "plan": {"arguments", "errors", "files", "problem", "timeline"},
    "children": set(),
    "carrying": {"arguments", "errors", "graph", "plan", "problem"},
    "trace": {"arguments", "files", "timeline"},
    "frontends": set(),
    "frontends._work": set(),
    "frontends._draws": {"errors"},
    "frontends._known_values": set(),
    "frontends._recorder": {
        "errors", "frontends._draws", "frontends._known_values", "frontends._work",
    },
    "frontends._fold": {"frontends._recorder", "frontends._work", "graph", "graph_file"},
    "frontends._optimizers": {"errors"},
    "frontends._explain": {"errors", "frontends._known_values", "frontends._recorder"},
    "frontends._modules": {"frontends._recorder"},
    "frontends.torch": {
        "arguments", "errors", "frontends._checks", "frontends._explain", "frontends._fold",
        "frontends._hooks",
        "frontends._modules", "frontends._optimizers", "frontends._recorder",
        "frontends._structures", "graph",
    },
    "frontends.exported": {"errors", "files", "frontends.torch"},
    "frontends.python_file": {"errors", "files"},
    "frontends._onnx_model": {"errors", "graph"},
    "frontends._onnx_file": {"errors", "frontends._onnx_model"},
    "frontends._onnx_shapes": {"errors", "frontends._onnx_model"},
    "frontends._onnx_work": {"frontends._onnx_model"},
    "frontends.onnx": {
        "errors", "frontends._onnx_file", "frontends._onnx_model", "frontends._onnx_shapes",
        "frontends._onnx_work", "graph", "graph_file",
    },
    "frontends._cache": {"errors", "files", "graph"},
    "frontends._hooks": {"errors"},
    "frontends._structures": {"errors"},
    "frontends._checks": {"arguments", "errors"},
    "zoo": {"errors", "zoo.recipes"},
    "zoo.inception": set(),
    "zoo.nasnet": set(),
    "zoo.recurrent": set(),
    "zoo.resnet": set(),
    "zoo.transformers": set(),
    "zoo.recipes": {
        "zoo.inception", "zoo.nasnet", "zoo.recurrent", "zoo.resnet", "zoo.transformers",
    },
    "evaluate": {"arguments", "costs", "problem", "simulator"},
    "grouping._kernels": {"_compiling"},
    "grouping._numbering": set(),
    "grouping.layers": {"costs", "graph"},
    "grouping.colocated": {"graph", "grouping._numbering", "problem"},
    "grouping.sole_consumer": {
        "graph", "grouping._kernels", "grouping._numbering", "grouping.colocated", "problem",
    },
    "grouping.heavy_edges": {
        "coarsening", "errors", "graph", "grouping._kernels", "grouping._numbering",
        "grouping.colocated", "problem",
    },
    "grouping.modules": {"errors", "graph", "grouping._numbering", "problem"},
    "grouping.layer_chunks": {"grouping._numbering", "grouping.layers", "problem"},
    "grouping.repeated_blocks": {"graph", "grouping.layers", "problem"},
    "grouping": {
        "grouping.colocated", "grouping.heavy_edges", "grouping.layer_chunks", "grouping.modules",
        "grouping.repeated_blocks", "grouping.sole_consumer", "problem",
    },
    "placers": set(),
    "placers.run": {"arguments", "errors", "evaluate", "problem", "units"},
    "placers.experts": {"errors", "grouping.layers", "problem", "simulator"},
    "placers.groups": {"grouping._numbering", "placers.run", "problem"},
    "placers.contiguous": {"costs", "evaluate", "placers.groups", "placers.run", "problem"},
    "placers._list_kernel": {"_compiling"},
    "placers.list_scheduling": {"costs", "graph", "placers._list_kernel", "problem", "simulator"},
    "placers._scotch": set(),
    "placers.partition": {"errors", "placers._scotch", "placers.experts", "problem"},
    "placers.repair": {"grouping", "placers.run", "problem", "units"},
    "placers.search": {
        "evaluate", "grouping", "placers.experts", "placers.groups", "placers.repair",
        "placers.run",
    },
    "placers.auto": {
        "errors", "placers.contiguous", "placers.experts", "placers.groups",
        "placers.list_scheduling", "placers.partition", "placers.repair", "placers.run",
        "placers.search", "problem", "simulator", "units",
    },
    "placing": {
        "arguments", "bounds", "coarsening", "errors", "evaluate", "files", "grouping",
        "placers.auto", "placers.contiguous", "placers.experts", "placers.list_scheduling",
        "placers.partition",
        "placers.repair", "placers.run", "placers.search", "plan", "policies.learned", "problem",
        "simulator", "timeline", "trace",
    },
    "comparing": {
        "arguments", "errors", "evaluate", "execute.calibration", "execute.expecting",
        "placers.run", "placing",
        "policies.learned", "problem", "units",
    },
    "policies": {"policies.learned", "policies.settings"},
    "policies._kernels": {"_compiling"},
    "policies.rewards": {"evaluate"},
    "policies.settings": {"errors", "policies.rewards"},
    "policies.interrupt": set(),
    "policies.memory": {"errors", "grouping", "policies.settings", "problem", "units"},
    "policies.rehearsal": {"cluster", "graph", "graph_file", "policies.settings", "problem"},
    "policies.learned": {
        "errors", "evaluate", "placers.run", "policies.colocrl", "policies.hierarchical",
        "policies.memory", "policies.rehearsal", "policies.settings", "problem",
    },
    "policies.features": {"graph", "policies._kernels", "problem"},
    "policies.seq2seq": {"policies._kernels"},
    "policies.checkpoint": {"errors", "files", "placers.run", "problem"},
    "policies.training": {
        "errors", "placers.run", "policies.checkpoint", "policies.interrupt", "policies.rewards",
        "policies.seq2seq", "policies.settings",
    },
    "policies.colocrl": {
        "grouping", "placers.groups", "placers.run", "policies._kernels", "policies.features",
        "policies.seq2seq", "policies.settings", "policies.training", "problem",
    },
    "policies.hierarchical": {
        "grouping", "grouping.layers", "placers.experts", "placers.run", "policies._kernels",
        "policies.features", "policies.seq2seq", "policies.settings", "policies.training",
        "problem", "simulator",
    },
    "load": {
        "arguments", "errors", "files", "graph", "cluster", "units", "problem", "simulator",
        "placers.experts",
        "execute.op_times", "frontends._cache", "frontends.exported", "frontends.onnx",
        "frontends.python_file", "frontends.torch", "zoo",
    },
    "execute": set(),
    "execute._cores": set(),
    "execute._lanes": set(),
    "execute._shares": {"errors", "execute._lanes"},
    "execute.devices": {
        "errors", "execute._cores", "execute._lanes", "execute._shares", "execute.allocation",
    },
    "execute._boxes": {"execute._boxes_kernel"},
    "execute._boxes_kernel": {"_compiling"},
    "execute._copies": {"execute._shares", "execute.devices"},
    "execute.kernels": set(),
    "execute._probe_cases": {"frontends._work"},
    "execute._probe_fit": {"cluster", "costs", "units"},
    "execute._probe_links": {
        "execute._probe_fit", "execute.devices", "execute.placed", "frontends.torch",
    },
    "execute._probe_memory": {"execute._shares", "execute.devices"},
    "execute._probe_timing": {
        "errors", "execute._probe_cases", "execute._probe_fit", "execute._probe_memory",
        "execute.devices", "execute.kernels", "units",
    },
    "execute.probing": {
        "__version__", "arguments", "cluster", "costs", "errors", "execute._probe_fit",
        "execute._probe_links",
        "execute._probe_memory", "execute._probe_timing", "execute.devices", "graph", "graph_file",
        "units",
    },
    "execute.op_times": {
        "cluster", "costs", "errors", "execute._cores", "execute._lanes", "files",
        "frontends._cache", "graph",
    },
    "execute.allocation": set(),
    "execute.issuing": {"execute.devices"},
    "execute._indices": {"frontends._work"},
    "execute.solo": {
        "execute._indices", "execute.devices", "execute.issuing", "execute.kernels",
        "execute.op_times", "frontends._recorder", "frontends._work", "frontends.torch",
    },
    "execute.op_bench": {
        "errors", "execute._cores", "execute._probe_memory", "execute.devices", "execute.graphs",
        "execute.issuing", "execute.op_times", "execute.solo", "units",
    },
    "execute.profiling": {
        "cluster", "costs", "errors", "execute._probe_memory", "execute.devices",
        "execute.op_bench", "execute.op_times", "execute.solo", "frontends.torch", "graph",
    },
    "execute.retiming": {
        "execute.devices", "execute.op_bench", "execute.op_times", "execute.profiling",
        "execute.solo", "frontends.torch",
    },
    "execute._source": set(),
    "execute._words": {"execute.kernels", "frontends._work"},
    "execute.graphs": set(),
    "execute.program": {
        "carrying", "execute._lanes", "execute._source", "execute._words", "execute.devices",
        "execute.kernels", "frontends._optimizers", "frontends._recorder", "frontends._work",
        "frontends.torch",
    },
    "execute.runtime": {
        "execute._boxes", "execute._copies", "execute.allocation", "execute.devices",
        "execute.graphs", "execute.program",
    },
    "execute.applying": {
        "arguments", "carrying", "errors", "execute.call_effects", "execute.calls",
        "execute.devices",
        "execute.generate", "execute.placed", "execute.program", "execute.residents",
        "frontends._structures", "frontends._work", "frontends.torch", "plan",
    },
    "execute.placed": {
        "carrying", "errors", "execute._probe_memory", "execute.devices", "execute.program",
        "execute.residents", "execute.runtime", "frontends.torch", "plan", "timeline", "units",
    },
    "execute._statistics": set(),
    "execute._wire": {"plan"},
    "execute._torch_library": set(),
    "execute._peaks": {"execute._torch_library", "execute.placed"},
    "execute._eager": {
        "execute._peaks", "execute.allocation", "execute.devices", "frontends._optimizers",
        "frontends._structures", "frontends.torch",
    },
    "execute._candidate": {
        "children", "errors", "execute._eager", "execute._peaks", "execute._wire",
        "execute.devices", "execute.placed", "frontends._structures", "frontends.torch", "load",
    },
    "execute._eager_process": {"execute._candidate", "execute._wire"},
    "execute._template": {
        "errors", "execute._candidate", "execute._torch_library", "execute._wire",
        "frontends._modules", "frontends._structures", "frontends.torch", "load",
    },
    "execute.processes": {
        "children", "errors", "execute._cores", "execute._wire", "load", "units",
    },
    "execute._jobs": {
        "cluster", "execute._lanes", "execute._wire", "execute.processes", "plan",
    },
    "execute.measuring": {
        "arguments", "cluster", "errors", "execute._cores", "execute._jobs", "execute._statistics",
        "execute._wire", "execute.processes", "plan",
    },
    "execute.measured": {
        "arguments", "errors", "evaluate", "execute._jobs", "execute._lanes",
        "execute._probe_memory", "execute._wire", "execute.devices", "execute.measuring",
        "execute.placed",
        "execute.processes", "graph", "problem", "simulator", "timeline",
    },
    "execute.replayed_peaks": {"graph", "timeline"},
    "execute.replay": {"_compiling", "costs", "execute._lanes", "graph", "timeline"},
    "execute.calibration": {
        "cluster", "errors", "execute.op_times", "execute.replay", "files", "frontends._cache",
        "problem", "simulator",
    },
    "execute.expecting": {
        "arguments", "errors", "evaluate", "execute.calibration", "execute.op_times",
        "execute.replay", "execute.replayed_peaks", "problem", "simulator", "timeline", "units",
    },
    "execute.residents": {"errors", "execute.devices", "frontends._modules", "frontends.torch"},
    "execute.module_watch": {"frontends._hooks", "frontends._modules"},
    "execute.call_effects": {
        "errors", "execute._copies", "frontends._modules", "frontends._recorder",
        "frontends._structures", "frontends.torch",
    },
    "execute.generate": {"errors"},
    "execute.calls": {"errors", "execute.module_watch", "frontends._structures"},
    "execute.train_step": {
        "arguments", "errors", "frontends._checks",
        "execute.call_effects", "execute.calls", "execute.devices", "execute.placed",
        "execute.program", "execute.residents", "frontends._modules", "frontends._optimizers",
        "frontends._structures", "frontends.torch", "plan",
    },
    "execute.load_watch": {"execute._cores"},
    "report": set(),
    "report.facts": {"cluster", "graph"},
    "report._figure": {"errors", "files", "graph"},
    "report._grid": {"graph", "grouping.layers"},
    "report.named": {"errors", "graph"},
    "report.drawing": {"errors", "graph", "report._figure", "report._grid", "units"},
    "report.curves": {"arguments", "errors", "files", "graph", "report._figure", "units"},
    "report.terminal": {
        "bounds", "cluster", "comparing", "costs", "graph", "placing", "problem", "report.facts",
        "timeline", "units",
    },
    "report.profiles": {"execute.profiling", "graph", "report.terminal", "units"},
    "report.measurements": {
        "cluster", "execute._statistics", "execute.measuring", "plan", "report.terminal", "units",
    },
    "report.scatter": {"errors", "report._figure", "units"},
    "report.live": {"placers.run", "units"},
    "bench": set(),
    "bench.published": set(),
    "bench.testbeds": {"bench.published", "errors"},
    "bench.cells": {"errors", "files"},
    "bench.worker": {
        "__version__", "bench.cells", "errors", "files", "load", "placing", "simulator",
    },
    "bench.pool": {"bench.cells", "bench.worker", "children", "errors", "placers.run"},
    "bench.summary": {"bench.cells", "units"},
    "bench.tables": {"errors", "files", "report.terminal"},
    "bench.table1": {
        "bench.cells", "bench.published", "bench.summary", "bench.tables", "bench.testbeds",
        "placers.experts",
    },
    "bench.table2": {
        "bench.cells", "bench.published", "bench.summary", "bench.tables", "bench.testbeds",
        "placers.run",
    },
    "bench.ablations": {
        "bench.cells", "bench.summary", "bench.tables", "bench.testbeds", "placers.run", "placing",
    },
    "bench.running": {
        "bench", "bench.cells", "bench.pool", "bench.summary", "bench.tables", "bench.testbeds",
        "errors", "placers.experts", "placers.run", "units",
    },
    "bench.fidelity_models": {"zoo.recipes"},
    "bench.fidelity_plans": {
        "errors", "execute.replay", "graph", "grouping.layers", "placing", "problem", "simulator",
    },
    "bench.fidelity_fit": {
        "bench.fidelity_plans", "errors", "execute.calibration", "execute.op_times",
        "execute.replay",
    },
    "bench.fidelity_deals": {"bench.fidelity_fit", "errors", "execute.calibration"},
    "bench.fidelity_book": {
        "bench.fidelity_plans", "cluster", "costs", "errors", "files", "graph", "problem",
    },
    "bench.fidelity": {
        "__version__", "bench.fidelity_book", "bench.fidelity_fit", "bench.fidelity_plans",
        "cluster", "errors", "execute._jobs", "execute._wire", "execute.devices",
        "execute.measuring", "execute.op_times", "execute.probing", "execute.processes",
        "execute.profiling", "execute.retiming", "load", "plan", "problem", "simulator",
        "timeline", "units",
    },
    "bench.fidelity_tables": {
        "bench.fidelity_book", "bench.fidelity_deals", "bench.fidelity_fit",
        "bench.fidelity_plans", "bench.tables",
        "errors", "execute.calibration", "execute.replay", "execute.replayed_peaks", "problem",
        "report.scatter", "simulator", "units",
    },
    "__version__": set(),
    "cli._options": set(),
    "cli._shared": {
        "bounds", "errors", "execute.expecting", "execute.load_watch", "frontends._cache",
        "frontends.onnx", "graph", "load", "placers.run", "placing", "problem", "report.live",
        "simulator", "timeline",
    },
    "cli.machine": {
        "cli._options", "cli._shared", "errors", "execute.probing", "files", "report.facts",
        "report.terminal",
    },
    "cli.models": {
        "bounds", "cli._options", "cli._shared", "cluster", "errors", "load", "placers.experts",
        "placing", "problem", "report.facts", "report.terminal", "timeline", "zoo",
    },
    "cli.simulating": {
        "bounds", "carrying", "cli._options", "cli._shared", "errors", "graph", "load",
        "placers.experts", "plan", "problem", "report.terminal", "trace",
    },
    "cli.placing": {
        "cli._options", "cli._shared", "comparing", "errors", "execute.expecting",
        "execute.measured", "load", "placing", "problem", "report.terminal",
    },
    "cli.measures": {
        "cli._options", "cli._shared", "cluster", "errors", "execute.measuring", "load", "plan",
        "report.measurements", "units",
    },
    "cli.profiles": {
        "cli._options", "cli._shared", "cluster", "errors", "execute.devices", "execute.op_times",
        "execute.profiling", "load", "report.profiles",
    },
    "cli.pictures": {
        "cli._options", "cli._shared", "errors", "graph", "plan", "report._figure",
        "report.curves", "report.drawing", "report.named", "units", "zoo",
    },
    "cli.fidelity": {
        "bench.fidelity", "bench.fidelity_book", "bench.fidelity_tables", "bench.tables",
        "cli._shared", "cluster", "errors", "execute.calibration", "report.scatter",
    },
    "cli.benches": {
        "bench.cells", "bench.pool", "bench.running", "bench.tables", "cli._shared",
        "cli.fidelity", "errors",
    },
    "cli": {
        "__version__", "cli.benches", "cli.machine", "cli.measures", "cli.models", "cli.pictures",
        "cli.placing", "cli.profiles", "cli.simulating", "execute._cores",
    },
    "cli.__main__": {"cli"},
}  # fmt: skip


def modules():
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            yield name, path


def _is_part(node):
    """Whether modules are imported from a package, rather than names from a module."""
    names = [alias.name for alias in node.names]
    folder = SOURCE / node.module.removeprefix("placewright.").replace(".", "/")
    return (node.module or "").startswith("placewright.") and all(
        (folder / f"{name}.py").exists() and name.startswith("_") for name in names
    )


def imported(path):
    """Every module of the package that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "placewright":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and _is_part(node):
            package = node.module.removeprefix("placewright.")
            yield from (f"{package}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("placewright."):
            yield node.module.removeprefix("placewright.")
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("placewright."):
                    yield alias.name.removeprefix("placewright.")


@pytest.mark.parametrize(("name", "path"), [*modules()], ids=str)
def test_imports_point_one_way(name, path):
    assert name in MAY_IMPORT, "add the module to MAY_IMPORT and to docs/architecture.md"
    assert set(imported(path)) <= MAY_IMPORT[name]


def test_there_is_no_cycle_of_modules():
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        ready = {name for name, needs in MAY_IMPORT.items() if needs <= done} - done
        assert ready, f"a cycle among {sorted(MAY_IMPORT.keys() - done)}"
        done |= ready


def loaded_after(code):
    script = f"{code}; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy():
    assert loaded_after("import placewright").isdisjoint(
        {"numpy", "numba", "torch", "scipy", "rich", "typer", "matplotlib"}
    )
    assert loaded_after("import placewright.cli").isdisjoint(
        {"numpy", "numba", "torch", "scipy", "matplotlib"}
    )


def test_public_names_resolve_and_have_docstrings():
    for name in placewright.__all__:
        value = getattr(placewright, name)
        if name != "__version__":
            assert inspect.getdoc(value), name
    assert set(placewright.__all__) <= set(dir(placewright))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = placewright.nothing


def test_no_public_function_shares_its_modules_name():
    names = {name.split(".")[-1] for name, _ in modules()}
    assert names.isdisjoint(placewright.__all__)


@pytest.mark.parametrize(("name", "path"), [*modules()], ids=str)
def test_every_module_says_what_it_owns(name, path):
    assert ast.get_docstring(ast.parse(path.read_text()))
