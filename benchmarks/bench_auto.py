"""
`auto` against the stronger expert on every pair of the two papers' tables, and on tight memory.

``python -m benchmarks.bench_auto [SECONDS]`` prints the table of docs/placers.md. As one of ``make
bench`` it takes ten seconds a pair.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from benchmarks.figures import Figure
from placewright.bench.testbeds import K40, K80, Testbed
from placewright.load import load_model, load_problem
from placewright.placing import place

GAP = 0.05
"""Where the expert is farther than this from the lower bound, `auto` should be faster."""


@dataclass(frozen=True)
class Row:
    bound_s: float
    expert_s: float
    expert_fits: bool
    auto_s: float
    auto_fits: bool
    samples: int
    how: str

    @property
    def is_met(self) -> bool:
        """Tell whether `auto` is strictly faster, or the expert near the bound."""
        if not self.auto_fits:
            return False
        near = self.expert_fits and self.expert_s <= (1 + GAP) * self.bound_s
        return near or not self.expert_fits or self.auto_s < self.expert_s


def _row(bed: Testbed, seconds: float) -> Row:
    problem = load_problem(load_model(bed.model), bed.cluster)
    expert = place(problem, "expert-strong")
    found = place(problem, "auto", budget_s=seconds)
    return Row(
        found.lower_bound_s,
        expert.makespan_s,
        expert.is_feasible,
        found.makespan_s,
        found.is_feasible,
        found.samples,
        found.history[-1].placer.removeprefix("auto: "),
    )


def run() -> list[Figure]:
    """Compare on every pair, plain and tight."""
    figures = []
    for plain in (*K40, *K80):
        for bed in (plain, plain.tight):
            row = _row(bed, 10.0)
            ratio = row.auto_s / row.expert_s
            label = f"{bed.model} on {bed.cluster}: auto over expert-strong"
            target = 1.0 if row.expert_fits and row.expert_s > (1 + GAP) * row.bound_s else None
            figures.append(Figure(label, ratio, "x", target, True))
    return figures


def main(seconds: float) -> None:
    """Print the table, in Markdown, as it is measured."""
    print("| model | testbed | bound s | expert-strong s | auto s | over expert | gap | by | |")
    print("|---|---|---|---|---|---|---|---|---|")
    plain = (*K40, *K80)
    for bed in (*plain, *(each.tight for each in plain)):
        row = _row(bed, seconds)
        expert = f"{row.expert_s:.4f}" + ("" if row.expert_fits else " (does not fit)")
        ours = f"{row.auto_s:.4f}" + ("" if row.auto_fits else " (does not fit)")
        print(
            f"| {bed.model} | {bed.cluster} | {row.bound_s:.4f} | {expert} | {ours}"
            f" | {row.auto_s / row.expert_s:.2f} | {row.auto_s / row.bound_s - 1:.0%}"
            f" | {row.how} | {'met' if row.is_met else 'missed'} |",
            flush=True,
        )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
