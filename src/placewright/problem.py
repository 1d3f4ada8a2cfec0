"""
`Problem` and `Candidate`: what is to be placed, and one answer to it.

This module owns which device may run which op, co-location, and what makes a candidate valid.

Letters: ``N`` ops, ``D`` devices, ``K`` co-location groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewright.arguments import WHOLE, expect_type, expect_word, show, to_array
from placewright.cluster import Cluster
from placewright.costs import MAX_TOTAL_PS, PS_PER_S, Costs
from placewright.errors import InputError
from placewright.graph import BoolArray, Graph, IdArray

Discipline: TypeAlias = Literal["fifo", "program", "priority"]
Triggers: TypeAlias = Mapping[tuple[int, int], int]
"""(tensor, reading device) -> the op whose end requests the fetch, or -1 for time 0."""


@dataclass(frozen=True, eq=False, repr=False)
class Problem:
    """
    A graph to be run on a cluster at given costs.

    Parameters
    ----------
    graph, cluster
        What to run, and where.
    costs
        Op times; estimated from the two if not given.

    Raises
    ------
    InputError
        Some op, or some co-location group as a whole, may run on no device of the cluster; or
        the times are too long for int64 picoseconds.
    """

    graph: Graph
    cluster: Cluster
    costs: Costs = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        expect_type(self.graph, Graph, "graph", "a `Graph`")
        expect_type(self.cluster, Cluster, "cluster", "a `Cluster`, such as `load_cluster` gives")
        if self.costs is None:
            object.__setattr__(self, "costs", Costs.estimate(self.graph, self.cluster))
        expect_type(self.costs, Costs, "costs", "`Costs`")
        if self.costs.op_ps.shape != (self.num_ops, self.num_devices):
            raise InputError(
                f"`costs` is for {self.costs.op_ps.shape} (ops, devices); expected"
                f" {(self.num_ops, self.num_devices)}."
            )
        _check_devices(self)
        _check_colocations(self)
        _check_horizon(self)

    def __repr__(self) -> str:
        return f"Problem({self.graph!r} on {self.cluster!r})"

    @property
    def num_ops(self) -> int:
        """Count the ops."""
        return self.graph.num_ops

    @property
    def num_devices(self) -> int:
        """Count the devices."""
        return self.cluster.num_devices

    @cached_property
    def allowed(self) -> BoolArray:  # [N, D]
        """Tell which device may run which op, by the kinds that the op lists."""
        rows = {
            kinds: np.array([kinds is None or kind in kinds for kind in self.cluster.device_kinds])
            for kinds in set(self.graph.op_device_kinds)
        }
        return np.stack([rows[kinds] for kinds in self.graph.op_device_kinds])

    @cached_property
    def colocation_allowed(self) -> BoolArray:  # [K, D]
        """Tell which device may run every op of a co-location group."""
        together = np.ones((len(self.graph.colocations), self.num_devices), dtype=np.bool_)
        member = self.graph.op_colocation >= 0
        np.logical_and.at(together, self.graph.op_colocation[member], self.allowed[member])
        return together

    @cached_property
    def colocation_members(self) -> IdArray:
        """List every op that is co-located with an earlier one (see `colocation_leaders`)."""
        return self._colocation_pairs[1]

    @cached_property
    def colocation_leaders(self) -> IdArray:
        """Give, for each of `colocation_members`, the first op of its group."""
        return self._colocation_pairs[0]

    @cached_property
    def _colocation_pairs(self) -> tuple[IdArray, IdArray]:
        members = np.flatnonzero(self.graph.op_colocation >= 0).astype(np.int32)
        _, first, group = np.unique(
            self.graph.op_colocation[members], return_index=True, return_inverse=True
        )
        leaders = members[first][group]
        return leaders[leaders != members], members[leaders != members]

    def check(self, candidate: Candidate | ArrayLike) -> Candidate:
        """
        Check a candidate, or a bare placement, and give it back with arrays of the right types.

        Raises
        ------
        InputError
            The placement has the wrong length, names an unknown device, puts an op where it may
            not run or splits a co-location group; priorities are missing, superfluous, of the
            wrong length or not finite; a trigger is not one.
        """
        if not isinstance(candidate, Candidate):
            candidate = Candidate(candidate)
        placement = self.check_placements(candidate.placement).copy()
        priorities = self.check_priorities(candidate.discipline, candidate.priorities)
        triggers = None if candidate.triggers is None else dict(candidate.triggers)
        _check_triggers(self, placement, triggers or {})
        return Candidate(placement, candidate.discipline, priorities, triggers)

    def check_placements(self, placements: ArrayLike) -> IdArray:
        """Check placements of any number of leading dimensions; the last one is the ops'."""
        array = to_array(placements, "placement", _PLACEMENT)
        if array.ndim == 0 or array.shape[-1] != self.num_ops:
            length = array.shape[-1] if array.ndim else "no"
            raise InputError(
                f"A placement has {length} entries; expected {self.num_ops}, one an op of graph"
                f" `{self.graph.name}`."
            )
        if not np.issubdtype(array.dtype, np.integer):
            raise InputError(f"A placement holds {array.dtype} values; expected device numbers.")
        if array.size and (array.min() < 0 or array.max() >= self.num_devices):
            worst = array.min() if array.min() < 0 else array.max()
            raise InputError(
                f"A placement names device {worst}; cluster `{self.cluster.name}` has devices 0"
                f" to {self.num_devices - 1}."
            )
        array = np.ascontiguousarray(array, dtype=np.int32)
        if self._is_constrained:
            for row in array.reshape(-1, self.num_ops):
                _check_row(self, row)
        return array

    @cached_property
    def _is_constrained(self) -> bool:
        return not self.allowed.all() or len(self.colocation_members) > 0

    def check_priorities(
        self, discipline: str, priorities: ArrayLike | None
    ) -> NDArray[np.float64] | None:
        """Check a discipline and its priorities, whose last dimension is the ops'; copy them."""
        array = _read_priorities(discipline, priorities)
        if array is None:
            return None
        if array.ndim == 0 or array.shape[-1] != self.num_ops:
            raise InputError(
                f"`priorities` has shape {array.shape}; expected {self.num_ops} numbers, one an op."
            )
        return array


@dataclass(frozen=True, eq=False)
class Candidate:
    """
    One answer to a problem: where every op runs, and optionally in which order.

    `priorities` (highest first) belong to the discipline ``priority``. `triggers` replace the
    default ones for the fetches they name.

    Types, and that priorities are finite and given where they belong, are checked here; what
    depends on the problem, such as lengths, by `Problem.check`.

    Raises
    ------
    InputError
        `placement` does not hold whole numbers; `discipline` is unknown; priorities are missing,
        superfluous or not finite; a trigger is not one of whole numbers.
    """

    placement: Any  # [N] device of every op
    discipline: Discipline = "fifo"
    priorities: Any = None  # [N]
    triggers: Triggers | None = None

    def __post_init__(self) -> None:
        given = self.placement
        # Searches make very many of these, of arrays: those cost next to nothing here.
        if not (isinstance(given, np.ndarray) and given.ndim == 1 and given.dtype.kind in "iu"):
            object.__setattr__(self, "placement", _read_placement(given))
        priorities = self.priorities
        if priorities is not None or not _is_fifo(self.discipline):
            priorities = _read_priorities(self.discipline, priorities)
            if priorities is not None and priorities.ndim != 1:
                raise InputError(
                    f"`priorities` has shape {priorities.shape}; expected one number an op."
                )
            object.__setattr__(self, "priorities", priorities)
        if self.triggers is not None:
            object.__setattr__(self, "triggers", _read_triggers(self.triggers))


_PLACEMENT = "the number of a device for each op"


def _is_fifo(discipline: object) -> bool:
    return isinstance(discipline, str) and discipline == "fifo"


def _read_placement(given: object) -> NDArray[Any]:
    array = to_array(given, "placement", _PLACEMENT)
    if array.dtype.kind == "f" and array.size:
        raise InputError(f"A placement holds {array.dtype} values; expected device numbers.")
    if array.ndim != 1:
        raise InputError(f"`placement` has shape {array.shape}; expected one device for each op.")
    return array


def _read_priorities(discipline: str, priorities: object) -> NDArray[np.float64] | None:
    expect_word(discipline, get_args(Discipline), "discipline")
    if (priorities is not None) != (discipline == "priority"):
        raise InputError(
            f"`discipline` is {discipline!r} and `priorities` are"
            f" {'missing' if priorities is None else 'given'}; they go with 'priority' alone."
        )
    if priorities is None:
        return None
    array = np.array(to_array(priorities, "priorities", "a number for each op"), np.float64)
    if not np.isfinite(array).all():
        raise InputError("`priorities` holds a number that is not finite.")
    return array


def _read_triggers(given: object) -> dict[tuple[int, int], int]:
    expected = "a mapping from (tensor, device) to an op, all of them numbers"
    expect_type(given, Mapping, "triggers", expected)
    triggers = {}
    for key, op in given.items():  # type: ignore[attr-defined]
        figures = (*key, op) if isinstance(key, tuple) else ()
        if len(figures) != 3 or not all(isinstance(n, WHOLE) for n in figures):
            raise InputError(
                f"`triggers` holds {show(key)}: {show(op)}; expected {expected}, such as"
                " `{(3, 0): -1}`."
            )
        tensor, device, after = (int(n) for n in figures)
        triggers[tensor, device] = after
    return triggers


def _check_devices(problem: Problem) -> None:
    nowhere = np.flatnonzero(~problem.allowed.any(axis=1))
    if nowhere.size:
        op = int(nowhere[0])
        kinds = problem.graph.op_device_kinds[op] or ()
        raise InputError(
            f"Op `{problem.graph.op_names[op]}` may run on {', '.join(kinds) or 'no device'}, but"
            f" cluster `{problem.cluster.name}` has only"
            f" {', '.join(sorted(set(problem.cluster.device_kinds)))}. Change the op's `devices` or"
            " use another cluster."
        )


def _check_colocations(problem: Problem) -> None:
    graph = problem.graph
    nowhere = np.flatnonzero(~problem.colocation_allowed.any(axis=1))
    if nowhere.size:
        group = int(nowhere[0])
        members = [graph.op_names[i] for i in np.flatnonzero(graph.op_colocation == group)]
        raise InputError(
            f"No device may run all of the co-location group `{graph.colocations[group]}`"
            f" ({', '.join(members[:5])}{', ...' if len(members) > 5 else ''}). Change `colocate`"
            " or `devices` of one of its ops."
        )


def _check_horizon(problem: Problem) -> None:
    graph, cluster = problem.graph, problem.cluster
    links = ~np.eye(cluster.num_devices, dtype=np.bool_)
    if not links.any():
        return
    per_byte_s = (1.0 / cluster.bytes_per_s[links]).max()
    moved = graph.tensor_bytes[graph.use_tensor].sum(dtype=np.float64)
    longest_s = moved * per_byte_s + graph.num_uses * cluster.latency_s.max()
    longest_s += problem.costs.op_ps.max(axis=1).sum(dtype=np.float64) / PS_PER_S
    if longest_s >= MAX_TOTAL_PS / PS_PER_S:
        raise InputError(
            f"A step of `{graph.name}` on `{cluster.name}` could take {longest_s:.3g} s; expected"
            f" at most {MAX_TOTAL_PS / PS_PER_S:.3g} s. Check sizes and bandwidths."
        )


def _check_row(problem: Problem, placement: IdArray) -> None:
    graph, cluster = problem.graph, problem.cluster
    wrong = ~problem.allowed[np.arange(problem.num_ops), placement]
    if wrong.any():
        op = int(np.flatnonzero(wrong)[0])
        raise InputError(
            f"Op `{graph.op_names[op]}` is placed on `{cluster.device_names[placement[op]]}`, but"
            f" may run only on {', '.join(graph.op_device_kinds[op] or ())}."
        )
    member = problem.colocation_members
    first = problem.colocation_leaders
    split = placement[member] != placement[first]
    if split.any():
        k = int(np.flatnonzero(split)[0])
        left, right = int(first[k]), int(member[k])
        raise InputError(
            f"Ops `{graph.op_names[left]}` and `{graph.op_names[right]}` are co-located, but placed"
            f" on `{cluster.device_names[placement[left]]}` and"
            f" `{cluster.device_names[placement[right]]}`."
        )


def _check_triggers(problem: Problem, placement: IdArray, triggers: Triggers) -> None:
    graph, cluster = problem.graph, problem.cluster
    for (tensor, device), op in triggers.items():
        if not 0 <= tensor < graph.num_tensors or not graph.tensor_is_resident[tensor]:
            raise InputError(f"A trigger names tensor {tensor}, which is not a persistent one.")
        if not 0 <= device < problem.num_devices:
            raise InputError(f"A trigger names device {device}, which does not exist.")
        where = f"The trigger of `{graph.tensor_name(tensor)}` on `{cluster.device_names[device]}`"
        uses = graph.use_op[graph.tensor_uses[tensor] : graph.tensor_uses[tensor + 1]]
        readers = uses[placement[uses] == device]
        if readers.size == 0 or placement[graph.tensor_op[tensor]] == device:
            raise InputError(f"{where} is for a tensor that this placement does not fetch there.")
        if op == -1:
            continue
        if not (0 <= op < readers[0]) or placement[op] != device or graph.op_is_resident[op]:
            raise InputError(
                f"{where} is op {op}; expected -1 for time 0, or an op that runs there before op"
                f" {readers[0]}, the first reader."
            )
