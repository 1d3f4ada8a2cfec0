"""
A graph told op by op: in a ``*.graph.json`` file, or in code.

This module owns the file format (version 1), references such as ``"op:1"``, control dependencies,
and the numbering of ops: the order given where it is a topological one, else Kahn's algorithm
with the lowest position first.
"""

from __future__ import annotations

import contextlib
import gc
import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from placewright import files
from placewright.errors import InputError

Bytes = int
Phase = Literal["forward", "backward", "update"]

MAX_DIMS = 16
"""What a tensor's shape may have; the shape of one with more is left unknown."""


class Output(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True, gc=False):
    """One tensor that an op makes."""

    bytes: Bytes
    persistent: bool = False
    keep: bool = False
    alias_of: str | None = None
    shape: tuple[int, ...] | None = None  # None: unknown


class Op(
    msgspec.Struct,
    forbid_unknown_fields=True,
    omit_defaults=True,
    kw_only=True,
    frozen=True,
    gc=False,
):
    """
    One op, as a graph file spells it.

    An input is ``"op"`` (its first output) or ``"op:k"``. `after` names ops that must have ended,
    without data. An output is a number of bytes or an `Output`. `devices` are the device kinds
    that may run it (all if absent). `time_s` are measured seconds by device name, model or kind.
    """

    name: str
    kind: str = "op"
    phase: Phase = "forward"
    module: str = ""
    dtype: str = "float32"
    inputs: Sequence[str] = ()
    after: Sequence[str] = ()
    outputs: Sequence[Bytes | Output] = ()
    flops: float = 0.0
    bytes: float = 0.0
    workspace: Bytes = 0
    colocate: str | None = None
    devices: Sequence[str] | None = None
    time_s: dict[str, float] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format: str
    version: int
    name: str
    ops: list[Op]


def read_ops(path: str | Path) -> tuple[str, list[Op]]:
    """
    Read a graph file, gzipped or not: the graph's name and its ops.

    Raises
    ------
    InputError
        The file cannot be read or is not a graph file.
    """
    with _collecting_later():
        file = files.read_json(path, _File, "graph file")
    return file.name, file.ops


@contextlib.contextmanager
def _collecting_later() -> Iterator[None]:
    """Pause the garbage collector, which hundreds of thousands of lists and shapes set off."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check_ops(ops: Iterable[Op]) -> list[Op]:
    """
    Check ops made in code as strictly as those of a file: by writing and reading them.

    Raises
    ------
    InputError
        A value has the wrong type.
    """
    try:
        return msgspec.json.decode(msgspec.json.encode([*ops], enc_hook=_plain), type=list[Op])
    except (msgspec.DecodeError, TypeError, OverflowError) as error:
        raise InputError(f"The ops are wrong: {files.reason_of(error)}.") from None


def _plain(value: Any) -> Any:
    """Let numpy's integers and floats through as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"a {type(value).__name__} cannot be part of a graph")


def write_ops(path: str | Path, name: str, ops: list[Op]) -> None:
    """Write a graph file, gzipped if `path` ends in ``.gz``."""
    file = _File(format="placewright-graph", version=1, name=name, ops=ops)
    files.write(path, msgspec.json.encode(file))


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Ops in topological order, with every reference resolved to a number."""

    ops: list[Op]  # [N]
    makers: list[int]  # [T] op of each tensor
    outputs: list[Output]  # [T]
    bases: list[int]  # [T] tensor it is an alias of, -1 for none
    uses: NDArray[np.int64]  # [U, 2] (tensor, op), sorted, without repeats


def wire(ops: Sequence[Op]) -> Wiring:
    """
    Number ops and tensors, and resolve references.

    An op that others run `after` gets one more output, of zero bytes, behind its own.

    Raises
    ------
    InputError
        A name is used twice, ends in ``:digits`` or is empty; a reference names no op or output;
        or the ops form a cycle (the message names it).
    """
    position = _positions(ops)
    edges = _resolve(ops, position)
    order = _topological_order(ops, edges)
    number = np.empty(len(ops), dtype=np.int64)
    number[order] = np.arange(len(ops))
    signals = set(edges[edges[:, 1] == _CONTROL, 0].tolist())
    first_tensor = np.zeros(len(ops), dtype=np.int64)  # by position
    control_tensor = np.full(len(ops), -1, dtype=np.int64)  # by position
    makers: list[int] = []
    outputs: list[Output] = []
    for i in order:
        first_tensor[i] = len(outputs)
        outputs += [Output(o) if isinstance(o, int) else o for o in ops[i].outputs]
        if i in signals:
            control_tensor[i] = len(outputs)
            outputs.append(Output(0))
        makers += [int(number[i])] * (len(outputs) - int(first_tensor[i]))
    maker, output, reader = edges.T
    tensor = np.where(output == _CONTROL, control_tensor[maker], first_tensor[maker] + output)
    uses = np.unique(tensor * len(ops) + number[reader])
    bases = [-1] * len(outputs)
    for t, made in enumerate(outputs):
        if made.alias_of is not None:
            base_op, k = _find(ops, position, ops[order[makers[t]]], made.alias_of)
            bases[t] = int(first_tensor[base_op]) + k
    return Wiring(
        ops=[ops[i] for i in order],
        makers=makers,
        outputs=outputs,
        bases=bases,
        uses=np.stack([uses // len(ops), uses % len(ops)], axis=1),
    )


_CONTROL = -1


def _resolve(ops: Sequence[Op], position: dict[str, int]) -> NDArray[np.int64]:
    """List every dependency as (maker's position, output or `_CONTROL`, reader's position)."""
    flat: list[int] = []
    for i, op in enumerate(ops):
        for ref in op.inputs:
            maker, output = _find(ops, position, op, ref)
            flat += (maker, output, i)
        for ref in op.after:
            if ref not in position:
                raise InputError(
                    f"Op `{op.name}` is to run after `{ref}`, but there is no such op."
                )
            flat += (position[ref], _CONTROL, i)
    return np.array(flat, dtype=np.int64).reshape(-1, 3)


def _positions(ops: Sequence[Op]) -> dict[str, int]:
    position: dict[str, int] = {}
    for i, op in enumerate(ops):
        if not op.name:
            raise InputError(f"Op {i} has an empty name. Give every op a name.")
        base, colon, digits = op.name.rpartition(":")
        if colon and base and digits.isdecimal():
            raise InputError(
                f"Op {i} is named `{op.name}`, which reads as output {digits} of `{base}`."
                " Names may not end in a colon and digits."
            )
        if position.setdefault(op.name, i) != i:
            raise InputError(
                f"Ops {position[op.name]} and {i} are both named `{op.name}`."
                " Give every op a name of its own."
            )
    return position


def _find(ops: Sequence[Op], position: dict[str, int], op: Op, ref: str) -> tuple[int, int]:
    """Find (position of the op, number of the output) that `ref` names."""
    maker, output = position.get(ref), 0
    if maker is None:
        base, _, digits = ref.rpartition(":")
        maker = position.get(base) if digits.isdecimal() and len(digits) < 10 else None
        if maker is None:
            raise InputError(f"Op `{op.name}` refers to `{ref}`, but there is no such op.")
        output = int(digits)
    made = len(ops[maker].outputs)
    if output >= made:
        raise InputError(
            f"Op `{op.name}` refers to output {output} of `{ops[maker].name}`, which has {made}"
            " outputs. Outputs count from 0; use `after` to depend on an op without its data."
        )
    return maker, output


def _topological_order(ops: Sequence[Op], edges: NDArray[np.int64]) -> Sequence[int]:
    """Keep the given order if it is topological; else use Kahn's, lowest position first."""
    if np.all(edges[:, 0] < edges[:, 2]):
        return range(len(ops))
    before: list[set[int]] = [set() for _ in ops]
    after: list[set[int]] = [set() for _ in ops]
    for maker, _, reader in edges.tolist():
        before[reader].add(maker)
        after[maker].add(reader)
    missing = [len(makers) for makers in before]
    ready = [i for i, count in enumerate(missing) if count == 0]
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for j in after[i]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, j)
    if len(order) < len(ops):
        raise InputError(_describe_cycle(ops, before, missing))
    return order


def _describe_cycle(ops: Sequence[Op], before: list[set[int]], missing: list[int]) -> str:
    # Every op that is left waits for another one that is left, so walking back must repeat.
    i = next(i for i, count in enumerate(missing) if count > 0)
    walk: list[int] = []
    seen: dict[int, int] = {}
    while i not in seen:
        seen[i] = len(walk)
        walk.append(i)
        i = min(j for j in before[i] if missing[j] > 0)
    cycle = [ops[j].name for j in [*walk[seen[i] :], i][::-1]]
    if len(cycle) > 9:
        cycle = [*cycle[:4], f"({len(cycle) - 8} more)", *cycle[-4:]]
    return (
        f"The ops form a cycle: {' -> '.join(f'`{name}`' for name in cycle)}."
        " A step runs every op once; unroll loops."
    )


def fields_of(wiring: Wiring) -> dict[str, Any]:
    """Make arrays of a wiring: every field of `Graph` but its name."""
    ops, outputs = wiring.ops, wiring.outputs
    colocations = tuple(dict.fromkeys(op.colocate for op in ops if op.colocate is not None))
    colocation_at = {word: k for k, word in enumerate(colocations)}
    return {
        "op_names": tuple(op.name for op in ops),
        "op_kinds": tuple(op.kind for op in ops),
        "op_phases": tuple(op.phase for op in ops),
        "op_modules": tuple(op.module for op in ops),
        "op_dtypes": tuple(op.dtype for op in ops),
        "op_flops": np.array([op.flops for op in ops], dtype=np.float64),
        "op_bytes": np.array([op.bytes for op in ops], dtype=np.float64),
        "op_workspace_bytes": _sizes([op.workspace for op in ops]),
        "op_colocation": np.array(
            [-1 if op.colocate is None else colocation_at[op.colocate] for op in ops], np.int32
        ),
        "op_device_kinds": tuple(None if op.devices is None else tuple(op.devices) for op in ops),
        "op_time_s": tuple(op.time_s or None for op in ops),
        "colocations": colocations,
        "tensor_op": np.array(wiring.makers, dtype=np.int32),
        "tensor_bytes": _sizes([output.bytes for output in outputs]),
        "tensor_persistent": np.array([output.persistent for output in outputs], dtype=np.bool_),
        "tensor_keep": np.array([output.keep for output in outputs], dtype=np.bool_),
        "tensor_base": np.array(wiring.bases, dtype=np.int32),
        "tensor_shapes": tuple(output.shape for output in outputs),
        "use_tensor": wiring.uses[:, 0].astype(np.int32),
        "use_op": wiring.uses[:, 1].astype(np.int32),
    }


def _sizes(values: list[int]) -> NDArray[np.int64]:
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError:
        raise InputError(
            "A size is more than int64 can hold. Check that sizes are in bytes."
        ) from None
