"""
`Graph`: the ops of one step of a model, the tensors they make, and who reads them.

This module owns the graph's arrays, what makes them valid, and their fingerprint. How a graph is
told op by op, in a file or in code, is in `placewright.graph_file`.

Letters: ``N`` ops, ``T`` tensors, ``U`` uses, ``K`` co-location groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from placewright.arguments import expect_path, expect_type, read_vector
from placewright.errors import InputError
from placewright.graph_file import (
    MAX_DIMS,
    Op,
    Output,
    check_ops,
    fields_of,
    read_ops,
    wire,
    write_ops,
)

IntArray: TypeAlias = NDArray[np.int64]
IdArray: TypeAlias = NDArray[np.int32]
FloatArray: TypeAlias = NDArray[np.float64]
BoolArray: TypeAlias = NDArray[np.bool_]

MAX_TOTAL_BYTES = 2**53
"""What a graph's sizes may add up to (9 PB), so that no sum over devices passes int64."""

_TYPES: dict[str, Any] = {
    "IntArray": np.int64,
    "IdArray": np.int32,
    "FloatArray": np.float64,
    "BoolArray": np.bool_,
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Graph:
    """
    A directed acyclic graph of ops, as a struct of arrays.

    Ops are numbered in topological order and tensors in the order of their ops. The arrays given
    are copied and made read-only. A *resident* op is one with persistent outputs: a
    parameter or a buffer. It takes no time and reads nothing.

    Guarantees, checked once here: every use comes after its tensor's op; uses are sorted by
    (tensor, op) without repeats; sizes are not negative and their sum fits int64; an alias comes
    after its base, and its op either makes or reads that base.

    Raises
    ------
    InputError
        One of the guarantees does not hold.
    """

    name: str
    op_names: tuple[str, ...]  # [N]
    op_kinds: tuple[str, ...]  # [N] "aten.mm", "param", ...
    op_phases: tuple[str, ...]  # [N] "forward", "backward" or "update"
    op_modules: tuple[str, ...]  # [N] "decoder.layers.3"
    op_dtypes: tuple[str, ...]  # [N]
    op_flops: FloatArray  # [N]
    op_bytes: FloatArray  # [N] read and written
    op_workspace_bytes: IntArray  # [N]
    op_colocation: IdArray  # [N] into `colocations`, -1 for none
    op_device_kinds: tuple[tuple[str, ...] | None, ...]  # [N] None: any
    op_time_s: tuple[Mapping[str, float] | None, ...]  # [N] measured, by device name, model or kind
    colocations: tuple[str, ...]  # [K]
    tensor_op: IdArray  # [T] the op that makes it
    tensor_bytes: IntArray  # [T]
    tensor_persistent: BoolArray  # [T]
    tensor_keep: BoolArray  # [T]
    tensor_base: IdArray  # [T] the tensor it is an alias of, -1 for none
    tensor_shapes: tuple[tuple[int, ...] | None, ...]  # [T] None: unknown
    use_tensor: IdArray  # [U]
    use_op: IdArray  # [U]

    def __post_init__(self) -> None:
        expect_type(self.name, str, "name", "text")
        for field in fields(self):
            if field.type in _TYPES:
                array = read_vector(getattr(self, field.name), field.name, _TYPES[str(field.type)])
                object.__setattr__(self, field.name, array)
            elif field.name != "name":
                expected = "a tuple with an entry for each op, tensor or group"
                expect_type(getattr(self, field.name), (tuple, list), field.name, expected)
                if field.type == "tuple[str, ...]":
                    for word in getattr(self, field.name):
                        expect_type(word, str, field.name, "a tuple of texts")
        _check_lengths(self)
        _check_ops(self)
        _check_tensors(self)
        _check_shapes(self)
        _check_uses(self)
        _check_residents(self)
        _check_aliases(self)

    @classmethod
    def build(cls, name: str, ops: Sequence[Op]) -> Graph:
        """
        Build a graph from its ops, in any order.

        Raises
        ------
        InputError
            An op has a value that a graph file could not have; the ops cannot be wired (see
            `placewright.graph_file.wire`); or they are not valid.
        """
        expect_type(ops, Iterable, "ops", "a list of `Op`")
        return cls(name=name, **fields_of(wire(check_ops(ops))))

    @classmethod
    def load(cls, path: str | Path) -> Graph:
        """
        Load a ``*.graph.json`` file, gzipped or not.

        Raises
        ------
        InputError
            The file cannot be read, is not a graph file, or describes no valid graph.
        """
        expect_path(path, "path")
        name, ops = read_ops(path)
        try:
            return cls(name=name, **fields_of(wire(ops)))
        except InputError as error:
            raise InputError(f"The graph file `{path}` is wrong: {error}") from None

    def save(self, path: str | Path) -> None:
        """
        Save as a ``*.graph.json`` file, gzipped if `path` ends in ``.gz``.

        Loading it gives back the same graph, array for array.
        """
        expect_path(path, "path")
        write_ops(path, self.name, self.describe())

    def describe(self) -> list[Op]:
        """
        Tell the graph op by op, so that `build` gives it back.

        A zero-byte last output without a shape that someone reads is told as the control
        dependency that it is.
        """
        is_control = _control_tensors(self)
        names = [self.tensor_name(t) for t in range(self.num_tensors)]
        return [_describe_op(self, i, names, is_control) for i in range(self.num_ops)]

    @property
    def num_ops(self) -> int:
        """Count the ops."""
        return len(self.op_names)

    @property
    def num_tensors(self) -> int:
        """Count the tensors, control tensors included."""
        return len(self.tensor_op)

    @property
    def num_uses(self) -> int:
        """Count the uses."""
        return len(self.use_op)

    @cached_property
    def op_outputs(self) -> IdArray:  # [N + 1]
        """Give each op's first tensor; op ``i`` makes ``op_outputs[i]:op_outputs[i + 1]``."""
        return _begins(self.tensor_op, self.num_ops)

    @cached_property
    def tensor_uses(self) -> IdArray:  # [T + 1]
        """Give each tensor's first use."""
        return _begins(self.use_tensor, self.num_tensors)

    @cached_property
    def tensor_root(self) -> IdArray:  # [T]
        """Follow every alias to the tensor whose memory it is; others are their own."""
        own = np.arange(self.num_tensors, dtype=np.int32)
        root = np.where(self.tensor_base >= 0, self.tensor_base, own)
        while (root[root] != root).any():
            root = root[root]
        return root

    @cached_property
    def input_order(self) -> IntArray:  # [U]
        """Sort the uses by (op, tensor)."""
        return np.lexsort((self.use_tensor, self.use_op))

    @cached_property
    def op_inputs(self) -> IdArray:  # [N + 1]
        """Give each op's first place in `input_order`."""
        return _begins(self.use_op[self.input_order], self.num_ops)

    @cached_property
    def op_is_resident(self) -> BoolArray:  # [N]
        """Tell the ops with persistent outputs."""
        resident = np.zeros(self.num_ops, dtype=np.bool_)
        resident[self.tensor_op[self.tensor_persistent]] = True
        return resident

    @cached_property
    def tensor_is_resident(self) -> BoolArray:  # [T]
        """Tell persistent tensors and the aliases of them that their own op makes."""
        is_alias = self.tensor_base >= 0
        return self.tensor_persistent | (is_alias & self.op_is_resident[self.tensor_op])

    @cached_property
    def fingerprint(self) -> str:
        """
        Name the graph by its content: structure, names, kinds, sizes and constraints.

        What only changes how long things take (flops, bytes moved, measured times) or how they
        are shown (graph name, module, phase, dtype, shapes) is left out, so that a plan outlives
        a new measurement.
        """
        digest = hashlib.sha256(b"placewright-graph-1")
        for words in (self.op_names, self.op_kinds, self.colocations):
            digest.update(repr(words).encode())
        kinds = [None if kinds is None else sorted(kinds) for kinds in self.op_device_kinds]
        digest.update(repr(kinds).encode())
        for array in (
            self.op_workspace_bytes,
            self.op_colocation,
            self.tensor_op,
            self.tensor_bytes,
            self.tensor_persistent,
            self.tensor_keep,
            self.tensor_base,
            self.use_tensor,
            self.use_op,
        ):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()

    def tensor_name(self, tensor: int) -> str:
        """Spell a tensor as graph files do: ``"op"`` for a first output, else ``"op:k"``."""
        op = int(self.tensor_op[tensor])
        output = tensor - int(self.op_outputs[op])
        return self.op_names[op] if output == 0 else f"{self.op_names[op]}:{output}"

    @cached_property
    def op_index(self) -> Mapping[str, int]:
        """Map each op's name to its number."""
        return {name: i for i, name in enumerate(self.op_names)}

    def __repr__(self) -> str:
        return f"Graph({self.name!r}: {self.num_ops:,} ops, {self.num_tensors:,} tensors)"


def _begins(sorted_ids: NDArray[Any], count: int) -> IdArray:
    return np.searchsorted(sorted_ids, np.arange(count + 1)).astype(np.int32)


def _check_lengths(graph: Graph) -> None:
    if graph.num_ops == 0:
        raise InputError(f"Graph `{graph.name}` has no ops. Give it at least one.")
    for field in fields(graph):
        value = getattr(graph, field.name)
        for prefix, expected in (("op_", graph.num_ops), ("tensor_", graph.num_tensors)):
            if field.name.startswith(prefix) and len(value) != expected:
                raise InputError(
                    f"Expected {expected} entries in `{field.name}`, one for each"
                    f" {prefix[:-1]}; got {len(value)}."
                )


def _check_ops(graph: Graph) -> None:
    if len(set(graph.op_names)) != graph.num_ops:
        seen: set[str] = set()
        twice = next(name for name in graph.op_names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise InputError(f"Two ops are named `{twice}`. Give every op a name of its own.")
    for field, unit in (("op_flops", "flops"), ("op_bytes", "bytes")):
        values = getattr(graph, field)
        bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
        if bad.size:
            raise InputError(
                f"Op `{graph.op_names[bad[0]]}` has {values[bad[0]]:g} {unit};"
                " expected a finite number that is not negative."
            )
    bad = np.flatnonzero(graph.op_workspace_bytes < 0)
    if bad.size:
        raise InputError(
            f"Op `{graph.op_names[bad[0]]}` has {graph.op_workspace_bytes[bad[0]]} bytes of"
            " workspace; expected a number that is not negative."
        )
    if graph.op_colocation.max() >= len(graph.colocations):
        raise InputError(
            f"`op_colocation` names group {graph.op_colocation.max()}; there are"
            f" {len(graph.colocations)}."
        )
    for name, times in zip(graph.op_names, graph.op_time_s, strict=True):
        for device, time_s in (times or {}).items():
            if not (np.isfinite(time_s) and time_s >= 0):
                raise InputError(
                    f"Op `{name}` takes {time_s:g} s on `{device}`; expected a finite number that"
                    " is not negative."
                )


def _check_tensors(graph: Graph) -> None:
    makers = graph.tensor_op
    if graph.num_tensors and (makers.min() < 0 or makers.max() >= graph.num_ops):
        raise InputError(f"`tensor_op` names an op that is not among the {graph.num_ops} ops.")
    if np.any(makers[1:] < makers[:-1]):
        raise InputError("`tensor_op` is not sorted. Number tensors in the order of their ops.")
    bad = np.flatnonzero(graph.tensor_bytes < 0)
    if bad.size:
        raise InputError(
            f"Tensor `{graph.tensor_name(int(bad[0]))}` has {graph.tensor_bytes[bad[0]]} bytes;"
            " expected a number that is not negative."
        )
    total = float(graph.tensor_bytes.sum(dtype=np.float64))
    total += float(graph.op_workspace_bytes.sum(dtype=np.float64))
    if total >= MAX_TOTAL_BYTES:
        raise InputError(
            f"The sizes of graph `{graph.name}` add up to {total:.3g} bytes; expected less than"
            f" {MAX_TOTAL_BYTES:.3g}. Check that they are in bytes."
        )


def _check_shapes(graph: Graph) -> None:
    for shape in dict.fromkeys(graph.tensor_shapes):  # tensors are many, their shapes few
        if shape is None:
            continue
        if len(shape) > MAX_DIMS:
            what = f"{len(shape)} dimensions; expected at most {MAX_DIMS}."
        elif not all(isinstance(size, int) and 0 <= size < 2**63 for size in shape):
            what = f"shape {[*shape]}; expected whole numbers that are not negative and fit int64."
        else:
            continue
        tensor = graph.tensor_shapes.index(shape)
        raise InputError(f"Tensor `{graph.tensor_name(tensor)}` has {what}")


def _check_uses(graph: Graph) -> None:
    tensors, ops = graph.use_tensor, graph.use_op
    if len(tensors) != len(ops):
        raise InputError(
            f"`use_tensor` has {len(tensors)} entries and `use_op` {len(ops)}; expected as many."
        )
    if len(ops) == 0:
        return
    if tensors.min() < 0 or tensors.max() >= graph.num_tensors:
        raise InputError(f"`use_tensor` names a tensor outside 0 ... {graph.num_tensors - 1}.")
    if ops.min() < 0 or ops.max() >= graph.num_ops:
        raise InputError(f"`use_op` names an op outside 0 ... {graph.num_ops - 1}.")
    key = tensors.astype(np.int64) * graph.num_ops + ops
    if np.any(key[1:] <= key[:-1]):
        raise InputError("Uses are not sorted by (tensor, op), or one is given twice.")
    bad = np.flatnonzero(graph.tensor_op[tensors] >= ops)
    if bad.size:
        tensor, op = int(tensors[bad[0]]), int(ops[bad[0]])
        raise InputError(
            f"Tensor `{graph.tensor_name(tensor)}` is read by op {op} (`{graph.op_names[op]}`)"
            f" before op {graph.tensor_op[tensor]} makes it. Number ops in topological order, or"
            " build the graph with `Graph.build`."
        )


def _check_residents(graph: Graph) -> None:
    resident = graph.op_is_resident
    reads = np.zeros(graph.num_ops, dtype=np.bool_)
    reads[graph.use_op] = True
    works = (graph.op_flops > 0) | (graph.op_bytes > 0) | (graph.op_workspace_bytes > 0)
    times = np.fromiter((bool(times) for times in graph.op_time_s), np.bool_, graph.num_ops)
    for what, bad in (
        ("inputs", resident & reads),
        ("flops, bytes or workspace", resident & works),
        ("measured times", resident & times),
    ):
        if bad.any():
            raise InputError(
                f"Op `{graph.op_names[np.flatnonzero(bad)[0]]}` has persistent outputs and also"
                f" {what}. A parameter only holds its weights; give the work to another op."
            )
    bases = graph.tensor_base[graph.tensor_is_resident & (graph.tensor_base >= 0)]
    if not graph.tensor_is_resident[bases].all():
        tensor = int(bases[~graph.tensor_is_resident[bases]][0])
        raise InputError(
            f"Tensor `{graph.tensor_name(tensor)}` of a parameter has an alias but is not"
            " persistent. Make it persistent."
        )
    ordinary = resident[graph.tensor_op] & ~graph.tensor_is_resident & (graph.tensor_bytes > 0)
    if ordinary.any():
        tensor = int(np.flatnonzero(ordinary)[0])
        raise InputError(
            f"Tensor `{graph.tensor_name(tensor)}` is not persistent but another output of its op"
            " is. Make it persistent, an alias of one that is, or the output of another op."
        )


def _check_aliases(graph: Graph) -> None:
    aliases = np.flatnonzero(graph.tensor_base >= 0)
    if graph.num_tensors and graph.tensor_base.max() >= graph.num_tensors:
        raise InputError(f"`tensor_base` names a tensor outside 0 ... {graph.num_tensors - 1}.")
    if aliases.size == 0:
        return
    bases = graph.tensor_base[aliases]
    makers = graph.tensor_op[aliases]
    uses = graph.use_tensor.astype(np.int64) * graph.num_ops + graph.use_op
    wanted = bases.astype(np.int64) * graph.num_ops + makers
    found = np.isin(wanted, uses) | (graph.tensor_op[bases] == makers)
    for bad, what, remedy in (
        (bases >= aliases, "which comes after it", "List the base first."),
        (~found, "which its op neither makes nor reads", "Add the base to the op's inputs."),
        (graph.tensor_persistent[aliases], "and persistent", "An alias is as lasting as its base."),
    ):
        if bad.any():
            k = int(np.flatnonzero(bad)[0])
            raise InputError(
                f"Tensor `{graph.tensor_name(int(aliases[k]))}` is an alias of"
                f" `{graph.tensor_name(int(bases[k]))}`, {what}. {remedy}"
            )


def _describe_op(graph: Graph, i: int, names: list[str], is_control: BoolArray) -> Op:
    order = graph.input_order[graph.op_inputs[i] : graph.op_inputs[i + 1]]
    inputs = graph.use_tensor[order].tolist()
    outputs = range(int(graph.op_outputs[i]), int(graph.op_outputs[i + 1]))
    colocation = int(graph.op_colocation[i])
    times = graph.op_time_s[i]
    return Op(
        name=graph.op_names[i],
        kind=graph.op_kinds[i],
        phase=graph.op_phases[i],  # type: ignore[arg-type]
        module=graph.op_modules[i],
        dtype=graph.op_dtypes[i],
        inputs=tuple(names[t] for t in inputs if not is_control[t]),
        after=tuple(graph.op_names[graph.tensor_op[t]] for t in inputs if is_control[t]),
        outputs=tuple(_describe_output(graph, t, names) for t in outputs if not is_control[t]),
        flops=float(graph.op_flops[i]),
        bytes=float(graph.op_bytes[i]),
        workspace=int(graph.op_workspace_bytes[i]),
        colocate=None if colocation < 0 else graph.colocations[colocation],
        devices=graph.op_device_kinds[i],
        time_s=None if times is None else dict(times),
    )


def _describe_output(graph: Graph, tensor: int, names: list[str]) -> int | Output:
    size = int(graph.tensor_bytes[tensor])
    persistent = bool(graph.tensor_persistent[tensor])
    keep = bool(graph.tensor_keep[tensor])
    base = int(graph.tensor_base[tensor])
    shape = graph.tensor_shapes[tensor]
    if not persistent and not keep and base < 0 and shape is None:
        return size
    return Output(size, persistent, keep, None if base < 0 else names[base], shape)


def _control_tensors(graph: Graph) -> BoolArray:
    is_last = np.ones(graph.num_tensors, dtype=np.bool_)
    is_last[:-1] = graph.tensor_op[1:] != graph.tensor_op[:-1]
    is_read = np.zeros(graph.num_tensors, dtype=np.bool_)
    is_read[graph.use_tensor] = True
    is_base = np.zeros(graph.num_tensors, dtype=np.bool_)
    is_base[graph.tensor_base[graph.tensor_base >= 0]] = True
    plain = ~graph.tensor_persistent & ~graph.tensor_keep & (graph.tensor_base < 0) & ~is_base
    plain &= np.array([shape is None for shape in graph.tensor_shapes], dtype=np.bool_)
    is_control: BoolArray = is_last & is_read & plain & (graph.tensor_bytes == 0)
    return is_control
