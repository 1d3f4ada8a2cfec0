"""The demo, on a real model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from placewright.plan import Plan

pytest.importorskip("torch")

ROOT = Path(__file__).parent.parent


def test_the_demo_writes_plans_and_traces(monkeypatch, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples/demo.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "BUDGET", "3s")
    module.main(tmp_path)
    printed = capsys.readouterr().out
    assert "proven lower bound" in printed
    assert "What to look at" in printed
    plan, expert = (Plan.load(tmp_path / f"{name}.plan.json") for name in ("auto", "expert-strong"))
    assert plan.predicted.is_feasible
    assert plan.predicted.makespan_s < expert.predicted.makespan_s
    assert len(list(tmp_path.glob("*.trace.json"))) == 8
    assert (tmp_path / "auto.placement.png").read_bytes()[:4] == b"\x89PNG"
