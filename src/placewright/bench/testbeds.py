"""
Which model runs on which cluster: the pairs of the two papers' tables, and their tight forms.

This module owns the list and how people choose from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from placewright.bench.published import TABLE_1
from placewright.errors import InputError

TIGHT = "-tight"


@dataclass(frozen=True)
class Testbed:
    """A model of the zoo on a cluster; one that ends in ``-tight`` has little memory."""

    model: str
    cluster: str

    @property
    def is_tight(self) -> bool:
        """Tell whether memory is what one GPU would need, times 60 %."""
        return self.cluster.endswith(TIGHT)

    @property
    def tight(self) -> Testbed:
        """Give the same with tight memory."""
        return Testbed(self.model, self.cluster + TIGHT)

    @property
    def family(self) -> str:
        """Give the cluster without its number of devices: ``k40``, ``k40-tight``."""
        return re.sub(r"x\d+", "", self.cluster)

    def __str__(self) -> str:
        return f"{self.model}@{self.cluster}"


K40 = tuple(Testbed(row.model, row.cluster) for row in TABLE_1)
"""The rows of the Hierarchical Planner's Table 1."""

K80 = tuple(
    Testbed(model, cluster)
    for model in ("rnnlm", "nmt-2", "inception-v3")
    for cluster in ("k80x2", "k80x4")
)
"""The rows of ColocRL's table (Mirhoseini et al., 2017); ``nmt-2`` stands for its NMT."""


def choose(
    testbeds: Sequence[Testbed], models: Sequence[str] | None, clusters: Sequence[str] | None
) -> list[Testbed]:
    """
    Choose testbeds by model and by cluster: None is all.

    A cluster is named in full (``k40x2``), by its family (``k40``, ``k40-tight``), or as
    ``tight``: all that are.

    Raises
    ------
    InputError
        A name is unknown, or nothing is left.
    """
    _check("model", models, [bed.model for bed in testbeds])
    _check("cluster", clusters, [name for bed in testbeds for name in _names(bed)])
    chosen = [
        bed
        for bed in testbeds
        if (models is None or bed.model in models)
        and (clusters is None or _names(bed) & {*clusters})
    ]
    if not chosen:
        raise InputError(
            f"No testbed has one of the models {', '.join(models or [])} on one of the clusters"
            f" {', '.join(clusters or [])}. There are: {', '.join(map(str, testbeds))}."
        )
    return chosen


def _names(bed: Testbed) -> set[str]:
    return {bed.cluster, bed.family, *(["tight"] if bed.is_tight else [])}


def _check(what: str, wanted: Sequence[str] | None, known: Sequence[str]) -> None:
    for name in wanted or ():
        if name not in known:
            there = ", ".join(sorted({*known}))
            raise InputError(f"This bench has no {what} `{name}`. It has: {there}.")
