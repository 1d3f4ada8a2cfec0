"""The shipped model, its generator and the demo."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from placewright.errors import InputError
from placewright.load import load_model, model_names
from placewright.plan import Plan

ROOT = Path(__file__).parent.parent


@pytest.fixture
def script(monkeypatch):
    """Import a script of the repository by its path."""

    def load(path):
        spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


def test_the_shipped_file_is_what_its_generator_makes(script):
    made, shipped = script("tools/make_gpt2_graph.py").make_graph(), load_model("gpt2-small")
    assert made.fingerprint == shipped.fingerprint
    assert made.op_flops.tolist() == shipped.op_flops.tolist()


def test_gpt2_small_has_its_published_size():
    graph = load_model("gpt2-small")
    weights = graph.tensor_bytes[graph.tensor_persistent].sum() / 3 / 4  # with two moments, float32
    # 124.4 million with biases; the graph leaves the linear layers' biases out.
    assert weights == pytest.approx(124.4e6, rel=0.002)
    # Six flops a weight and token (without the position table), and attention.
    tokens = 12 * 1024
    matmuls = sum(
        f for f, kind in zip(graph.op_flops, graph.op_kinds, strict=True) if kind == "aten.mm"
    )
    assert matmuls == pytest.approx(6 * tokens * (124.4e6 - 1024 * 768), rel=0.002)


def test_every_shipped_model_loads_and_unknown_ones_are_told_the_known():
    assert model_names() == ("gpt2-small",)
    with pytest.raises(
        InputError, match=r"There is no model `nothing`\. Those that ship .* are: gpt2-small"
    ):
        load_model("nothing")


def test_the_demo_writes_plans_and_traces(script, tmp_path, capsys):
    script("examples/demo.py").main(tmp_path)
    printed = capsys.readouterr().out
    assert "proven lower bound" in printed
    assert "What to look at" in printed
    plan = Plan.load(tmp_path / "four-gpus-by-layer.plan.json")
    assert plan.predicted.is_feasible
    assert len(list(tmp_path.glob("*.trace.json"))) == 6
