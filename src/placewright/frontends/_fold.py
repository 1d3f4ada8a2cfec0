"""
From recorded calls to ops: what is free is folded away, what is left gets its edges.

This module owns these rules:

* A view costs nothing and becomes no op. Its readers read the tensor it looks at; if it is smaller
  than that, they read an alias with the view's own bytes, one more output of the same op.
* A parameter, buffer or constant is an op with persistent outputs. Its forward readers and the
  others read two different aliases of it.
* An op that overwrites a tensor makes an alias of it, which later readers read, and runs after
  everyone who read the tensor as it was. One that overwrites a parameter or buffer is also
  co-located with it.
* The calls that update one parameter are one op, co-located with it.
* Where a gradient is the sum of many, it is added up as they come, as PyTorch does; or, on
  request, once all of them are there, as TensorFlow's graphs do.
* A small constant tensor made on the spot (``zeros``, ``arange``) is made by each of its readers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec
from torch import fx

from placewright.frontends._recorder import Call, Storage, Value
from placewright.frontends._work import CREATORS, moved_bytes, name_of
from placewright.graph import Graph
from placewright.graph_file import MAX_DIMS, Op, Output, Phase

REMAKE_BYTES = 64 * 1024
"""A tensor made out of nothing, of up to so many bytes, is made again by each of its readers."""

_Ref: TypeAlias = "tuple[_Draft, int]"  # an op and the number of one of its outputs


@dataclass(eq=False)
class Entry:
    """A tensor that is there before the step: parameter, buffer, constant, state or input."""

    name: str
    kind: str  # "param", "buffer", "constant", "input", "gradient", or "state" of param `name`
    value: Value
    module: str = ""
    state: str = ""  # what an optimiser calls it


@dataclass(eq=False)
class Folded:
    """A graph, and which nodes of the recorded `torch.fx.Graph` its ops and tensors stand for."""

    graph: Graph
    op_nodes: tuple[tuple[str, ...], ...]  # [N] those that an op computes, in order
    tensor_nodes: tuple[str, ...]  # [T] the one whose result a tensor is; "" for control


@dataclass(eq=False)
class _Draft:
    """An op in the making."""

    name: str
    kind: str
    phase: Phase
    module: str
    dtype: str
    inputs: dict[_Ref, None] = field(default_factory=dict)
    after: dict[_Draft, None] = field(default_factory=dict)
    outputs: list[Output] = field(default_factory=list)
    output_nodes: list[str] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    heaviest: float = -1.0  # bytes of the call that gave the kind
    flops: float = 0.0
    bytes: float = 0.0
    workspace: int = 0
    is_resident: bool = False

    def add_output(self, output: Output, node: str) -> _Ref:
        self.outputs.append(output)
        self.output_nodes.append(node)
        return self, len(self.outputs) - 1


def _spell(ref: _Ref) -> str:
    draft, output = ref
    return draft.name if output == 0 else f"{draft.name}:{output}"


def _alias(ref: _Ref) -> Output:
    """Make an alias of all of a tensor."""
    draft, output = ref
    made = draft.outputs[output]
    return Output(made.bytes, alias_of=_spell(ref), shape=made.shape)


def _shape_of(value: Value) -> tuple[int, ...] | None:
    shape: tuple[int, ...] = value.node.meta["tensor"][0]
    return shape if len(shape) <= MAX_DIMS else None


def _output(value: Value) -> Output:
    """Make a tensor that is all of a storage, of which `value` may be a part."""
    while value.parent is not None:
        value = value.parent
    return Output(value.storage.bytes, shape=_shape_of(value))


@dataclass(eq=False)
class _Held:
    """Where the current content of a storage is."""

    ref: _Ref | None  # None: nobody has made it yet, `maker` is repeated by whoever needs it
    maker: Call | None = None
    resident: _Draft | None = None  # the parameter or buffer that this is the content of
    writer: tuple[_Draft, str] | None = None  # who overwrote that last, and the node of its result
    readers: dict[_Draft, None] = field(default_factory=dict)  # since it was written
    aliases: dict[tuple[fx.Node | None, bool], _Ref] = field(default_factory=dict)


class _Folder:
    """Walks the calls in order and drafts ops."""

    def __init__(self, calls: Sequence[Call], summed: Iterable[Value]) -> None:
        self.drafts: dict[_Draft, None] = {}  # in the order of the ops
        self._sums: dict[Storage, _Draft] = {}
        self._held: dict[Storage, _Held] = {}
        self._updates: dict[str, _Draft] = {}
        self._parameters: dict[str, _Draft] = {}
        self._joined: dict[_Draft, _Draft] = {}  # co-location, as a forest
        self._taken: Counter[str] = Counter()
        self._num_readers: Counter[Storage] = Counter(
            storage
            for call in calls
            if not call.is_view
            for storage in {value.storage for value in call.reads}
        )
        self._partial = self._find_sums(calls, summed)

    def enter(self, entry: Entry) -> None:
        """Draft the op of a tensor that is there before the step."""
        size, node = entry.value.storage.bytes, entry.value.node.name
        if entry.kind == "state":
            draft = self._parameters[entry.name]
        else:
            draft = self._draft(entry.name, entry.kind, "forward", entry.module, entry.value.dtype)
            draft.is_resident = entry.kind not in ("input", "gradient")
            if entry.kind == "param":
                self._parameters[entry.name] = draft
        shape = _shape_of(entry.value)
        ref = draft.add_output(Output(size, persistent=draft.is_resident, shape=shape), node)
        resident = draft if draft.is_resident else None
        self._held[entry.value.storage] = _Held(ref, resident=resident)

    def add(self, call: Call) -> None:
        """Draft the op of one call, or fold it."""
        if call.is_view:
            return
        name = name_of(call.target)
        made = [value for value in call.makes if value.parent is None]
        if name in CREATORS and len(made) == 1 and call.parameter is None:
            storage = made[0].storage
            if storage.bytes <= REMAKE_BYTES or self._num_readers[storage] == 1:
                self._held[storage] = _Held(None, call)
                return
        if call in self._partial:
            self._sum(call, name, made[0])
        else:
            self._draft_call(call, name, made)

    def _find_sums(self, calls: Sequence[Call], summed: Iterable[Value]) -> set[Call]:
        """Find the additions that only make up a part, or all, of one of the `summed`."""
        makers = {v.storage: call for call in calls for v in call.makes if v.parent is None}
        found: set[Call] = set()
        waiting = [value.storage for value in summed]
        while waiting:
            storage = waiting.pop()
            call = makers.get(storage)
            if call is None or self._num_readers[storage] > 1:
                continue
            parts = [value for value in call.reads if value.bytes == storage.bytes]
            if name_of(call.target) == "add" and len(parts) == 2 and call.phase == "backward":
                found.add(call)
                waiting += [value.storage for value in parts]
        return found

    def _sum(self, call: Call, name: str, made: Value) -> None:
        """Draft a sum of two gradients, or go on with the sum that one of them is."""
        whole = next((v.storage for v in call.reads if v.storage in self._sums), None)
        if whole is None:
            self._draft_call(call, name, [made])
        else:
            draft = self._sums.pop(whole)
            self.drafts[draft] = self.drafts.pop(draft)  # comes after all that it adds up
            draft.nodes.append(call.node.name)
            draft.flops += call.flops
            for value in call.reads:
                if value.storage is not whole:
                    self._read(draft, value)
                    draft.bytes += min(value.bytes, value.storage.bytes)
            draft.output_nodes[0] = made.node.name
            self._held[made.storage] = self._held.pop(whole)
        held = self._held[made.storage]
        assert held.ref is not None
        self._sums[made.storage] = held.ref[0]

    def keep(self, value: Value) -> None:
        """Keep a tensor until the end of the step: it is an output of the graph."""
        held = self._held[value.storage]
        if held.ref is None:
            assert held.maker is not None
            self._draft_call(held.maker, name_of(held.maker.target), [value])
            held = self._held[value.storage]
        draft, output = self._ref(value, held, False)
        if not draft.is_resident:
            draft.outputs[output] = msgspec.structs.replace(draft.outputs[output], keep=True)

    def _draft_call(self, call: Call, name: str, made: list[Value]) -> None:
        draft = self._draft_of(call, name)
        draft.nodes.append(call.node.name)
        reads = [] if name in CREATORS else call.reads
        for value in reads:
            if value not in call.writes:
                self._read(draft, value)
        if name in CREATORS:
            refs = (self._held[value.storage].ref for value in call.reads)
            draft.after |= {ref[0]: None for ref in refs if ref is not None}
        for value in dict.fromkeys(call.writes):
            self._write(draft, value)
        for value in made:
            if call.parameter is not None:  # lives inside the update
                draft.workspace += value.storage.bytes
                continue
            ref = draft.add_output(_output(value), value.node.name)
            self._held[value.storage] = _Held(ref)
        sizes = [min(value.bytes, value.storage.bytes) for value in reads]
        moved = moved_bytes(
            name, sizes, (v.storage.bytes for v in made), (v.bytes for v in call.writes)
        )
        draft.flops += call.flops
        draft.bytes += moved
        if moved > draft.heaviest:
            draft.heaviest, draft.kind = moved, f"{call.target.namespace}.{name}"

    def _draft_of(self, call: Call, name: str) -> _Draft:
        """Start a draft, or go on with that of the parameter that the call updates."""
        if call.parameter in self._updates:
            return self._updates[call.parameter]
        dtypes = [value.dtype for value in (*call.makes, *call.writes, *call.reads)]
        dtype = next((d for d in dtypes if "float" in d), dtypes[0] if dtypes else "float32")
        if call.parameter is not None:
            draft = self._draft(f"{call.parameter}.update", name, "update", call.module, dtype)
            self._updates[call.parameter] = draft
            self._join(draft, self._parameters[call.parameter])
            return draft
        middle = "backward." if call.phase == "backward" else ""
        stem = f"{call.module}.{middle}{name}".lstrip(".")
        phase: Phase = "backward" if call.phase == "backward" else "forward"
        return self._draft(stem, name, phase, call.module, dtype)

    def _draft(self, stem: str, kind: str, phase: Phase, module: str, dtype: str) -> _Draft:
        self._taken[stem] += 1
        name = stem if self._taken[stem] == 1 else f"{stem}_{self._taken[stem]}"
        if name != stem:
            self._taken[name] += 1
            if self._taken[name] > 1:
                return self._draft(stem, kind, phase, module, dtype)
        draft = _Draft(name, kind, phase, module, dtype)
        self.drafts[draft] = None
        return draft

    def _read(self, draft: _Draft, value: Value) -> None:
        held = self._held.get(value.storage)
        if held is None:  # made earlier inside the same update
            return
        if held.ref is None:
            assert held.maker is not None
            draft.workspace += value.storage.bytes
            draft.bytes += value.storage.bytes
            return
        if held.ref[0] is draft:
            return
        if held.writer is not None:  # it reads what the last to overwrite it has made of it
            writer, node = held.writer
            if writer is draft:
                return
            ref = writer.add_output(_alias(held.ref), node)
            held.ref, held.writer, held.aliases = ref, None, {}
        draft.inputs[self._ref(value, held, draft.phase == "forward")] = None
        held.readers[draft] = None

    def _ref(self, value: Value, held: _Held, is_forward: bool) -> _Ref:
        """Find the tensor through which `value` is read: the one that holds it, or an alias."""
        assert held.ref is not None
        draft, output = held.ref
        view: Value | None = value
        while view is not None and view.parent is not None and view.parent.bytes <= view.bytes:
            view = view.parent
        assert view is not None
        if view.bytes >= value.storage.bytes:
            view = None
        if view is None and (not draft.is_resident or output > 0):
            return held.ref
        key = (None if view is None else view.node, draft.is_resident and is_forward)
        if key not in held.aliases:
            if view is None:
                alias, node = _alias(held.ref), draft.output_nodes[output]
            else:
                alias = Output(view.bytes, alias_of=_spell(held.ref), shape=_shape_of(view))
                node = view.node.name
            held.aliases[key] = draft.add_output(alias, node)
        return held.aliases[key]

    def _write(self, draft: _Draft, value: Value) -> None:
        held = self._held.get(value.storage)
        if held is None or (held.ref is not None and held.ref[0] is draft):
            return
        if held.ref is None:  # made here and now
            draft.bytes += value.storage.bytes
            self._held[value.storage] = _Held(draft.add_output(_output(value), value.node.name))
            return
        for reader in held.readers:
            if reader is not draft:
                draft.after[reader] = None
        if held.resident is not None:
            if held.writer is not None and held.writer[0] is not draft:
                draft.after[held.writer[0]] = None
            draft.inputs[held.ref] = None
            self._join(draft, held.resident)
            held.writer, held.readers = (draft, value.node.name), {}
            return
        draft.inputs[held.ref] = None
        ref = draft.add_output(_alias(held.ref), value.node.name)
        self._held[value.storage] = _Held(ref)

    def _root(self, draft: _Draft) -> _Draft:
        while draft in self._joined:
            draft = self._joined[draft]
        return draft

    def _join(self, left: _Draft, right: _Draft) -> None:
        first, second = self._root(left), self._root(right)
        if first is not second:
            self._joined[first] = second

    def finish(self, name: str) -> Folded:
        """Build the graph."""
        roots = {self._root(draft) for draft in self._joined}
        ops = [self._op(draft, roots) for draft in self.drafts]
        graph = Graph.build(name, ops)
        assert graph.op_names == tuple(op.name for op in ops), "calls are in topological order"
        signals = {name for op in ops for name in op.after}
        nodes: list[str] = []
        for draft in self.drafts:
            nodes += draft.output_nodes
            nodes += [""] * (draft.name in signals)
        assert len(nodes) == graph.num_tensors
        return Folded(graph, tuple(tuple(draft.nodes) for draft in self.drafts), tuple(nodes))

    def _op(self, draft: _Draft, roots: set[_Draft]) -> Op:
        makers = {ref[0] for ref in draft.inputs}
        root = self._root(draft)
        return Op(
            name=draft.name,
            kind=draft.kind,
            phase=draft.phase,
            module=draft.module,
            dtype=draft.dtype,
            inputs=tuple(_spell(ref) for ref in draft.inputs),
            after=tuple(other.name for other in draft.after if other not in makers),
            outputs=tuple(draft.outputs),
            flops=draft.flops,
            bytes=draft.bytes,
            workspace=draft.workspace,
            colocate=root.name if root in roots else None,
        )


def fold(
    name: str,
    entries: Iterable[Entry],
    calls: Sequence[Call],
    kept: Iterable[Value],
    summed_at_end: Iterable[Value] = (),
) -> Folded:
    """
    Make a graph of recorded calls.

    `entries` are the tensors that are there before the first call, a parameter's state after the
    parameter; `kept` are those that must be there at the end. The parts of a tensor that is
    `summed_at_end` are added up when all are there.
    """
    folder = _Folder(calls, summed_at_end)
    for entry in entries:
        folder.enter(entry)
    for call in calls:
        folder.add(call)
    for value in kept:
        folder.keep(value)
    return folder.finish(name)
