"""
Figures that the Hierarchical Planner's paper prints (Mirhoseini et al., 2018), in seconds.

This module owns the only copy of them. They were measured on a Haswell host with Tesla K40s; which
of our models stands for which of theirs, and why, is in docs/testbeds.md.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Table1Row:
    """One row of Table 1: seconds a step."""

    model: str
    cluster: str
    cpu_s: float | None  # None: not given
    gpu_s: float | None  # None: out of memory
    expert_s: float
    scotch_s: float
    mincut_s: float
    planner_s: float

    def seconds(self, placer: str) -> float | None:
        """Give the time that is published for what one of our placers stands for, if any."""
        return {
            "cpu-only": self.cpu_s,
            "one-gpu": self.gpu_s,
            "expert-paper": self.expert_s,
            "scotch": self.scotch_s,
            "mincut": self.mincut_s,
            "hierarchical": self.planner_s,
        }.get(placer)


TABLE_1 = (
    Table1Row("inception-v3-b1", "k40x2", 0.61, 0.15, 0.15, 0.93, 0.82, 0.13),
    Table1Row("resnet-152-b32", "k40x2", None, 1.18, 1.18, 6.27, 2.92, 1.18),
    Table1Row("rnnlm", "k40x2", 6.89, 1.57, 1.57, 5.62, 5.21, 1.57),
    Table1Row("nmt-2", "k40x2", 6.46, None, 2.13, 3.21, 5.34, 0.84),
    Table1Row("nmt-4", "k40x4", 10.68, None, 3.64, 11.18, 11.63, 1.69),
    Table1Row("nmt-8", "k40x8", 11.52, None, 3.88, 17.85, 19.01, 4.07),
)


@dataclass(frozen=True)
class Table2Row:
    """One row of Table 2: random groupings with a learned placer, against a learned grouping."""

    model: str
    cluster: str
    best_s: float
    median_s: float
    worst_s: float
    improvement: float  # of the learned grouping over the best random one


TABLE_2 = (
    Table2Row("inception-v3-b1", "k40x2", 0.22, 0.51, 0.65, 0.409),
    Table2Row("resnet-152-b32", "k40x2", 1.18, 1.18, 1.18, 0.0),
    Table2Row("rnnlm", "k40x2", 1.57, 1.57, 1.57, 0.0),
    Table2Row("nmt-2", "k40x2", 2.25, 3.72, 4.45, 0.627),
    Table2Row("nmt-4", "k40x4", 3.20, 3.42, 6.91, 0.472),
    Table2Row("nmt-8", "k40x8", 6.35, 6.86, 7.23, 0.359),
)
