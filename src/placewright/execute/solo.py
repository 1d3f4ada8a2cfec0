"""
One op of a captured step by itself: what it calls, and tensors to call it on.

This module owns what an op is given when the step around it does not run: memory of the captured
sizes and strides, floating-point numbers between 0.5 and 1.5, and whole numbers that are valid
where they are used as indices. Some memory cannot be made up, since only the op that makes it knows
its form (workspaces, pivots, offsets): that op is run once beforehand. Views are looked through
beforehand; what the op makes out of nothing it makes each time it is called.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from placewright.execute._indices import find_indices
from placewright.execute.devices import RealDevice
from placewright.execute.issuing import below_autograd
from placewright.execute.kernels import kernel_for
from placewright.execute.op_times import op_signatures, use_distances
from placewright.frontends._recorder import Call, Storage, Value
from placewright.frontends._work import CREATORS, name_of
from placewright.frontends.torch import Capture

_BLOCK = 64 * 1024
"""Memory is filled with repetitions of so many numbers, which is quicker than new ones."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Memory that an op reads or overwrites, and what to fill it with."""

    root: fx.Node  # whose result all of it is
    bytes: int
    distance: int  # among `DISTANCES`, when the op runs in its step
    is_written: bool
    bound: int = 1  # of whole numbers in it
    rising: int = 0  # whole numbers rise from 0 to `bound` over so many; 0: they are random
    left: Tensor | None = None  # what another op has left there; None: numbers are made up

    def allocate(self, device: torch.device) -> Tensor:
        """Make and fill such memory, as the root's result."""
        if self.left is not None:
            return self.left.clone()
        shape, stride, dtype = self.root.meta["tensor"]
        flat = torch.empty(self.bytes // dtype.itemsize, dtype=dtype, device=device)
        self._make_up(flat)
        return flat.as_strided(shape, stride)

    def refill(self, tensor: Tensor) -> None:
        """Fill what `allocate` has made anew."""
        if self.left is not None:
            tensor.copy_(self.left)
        else:
            self._make_up(tensor.as_strided((self.bytes // tensor.itemsize,), (1,), 0))

    def _make_up(self, flat: Tensor) -> None:
        block = _block(flat.dtype, flat.device, self.bound, self.rising)
        whole = len(flat) // len(block) * len(block)
        if whole:
            flat[:whole].view(-1, len(block)).copy_(block)
        flat[whole:].copy_(block[: len(flat) - whole])


@functools.lru_cache(maxsize=64)
def _block(dtype: torch.dtype, device: torch.device, bound: int, rising: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    if dtype.is_floating_point or dtype.is_complex:
        block = torch.rand(_BLOCK, generator=random) + 0.5
    elif rising:
        block = torch.linspace(0, bound - 1, rising, dtype=torch.float64)
    else:
        limit = 2 if dtype == torch.bool else min(bound, torch.iinfo(dtype).max)
        block = torch.randint(limit, (_BLOCK,), generator=random)
    return block.to(device, dtype)


@dataclass(frozen=True, eq=False)
class Solo:
    """An op that can be called by itself."""

    call: Callable[..., Any]  # on what `make` gives; returns what the op makes:
    makes: tuple[Storage, ...]
    memories: tuple[Memory, ...]
    device: torch.device
    num_calls: int  # that PyTorch has for it
    _looks: tuple[tuple[int, fx.Node], ...]  # which memory, seen as which node's result
    _values: dict[str, Value] = field(repr=False)
    _calls: dict[str, Call] = field(repr=False)

    def bytes_at(self, distance: int) -> int:
        """Add up the memory that is so far away."""
        return sum(memory.bytes for memory in self.memories if memory.distance == distance)

    def make(self, num_copies: Sequence[int]) -> Arguments:
        """Make arguments for `call`, with so many copies of memory at each distance."""
        roots = [
            [memory.allocate(self.device) for _ in range(num_copies[memory.distance])]
            for memory in self.memories
        ]
        every = []
        for copy in range(max(num_copies)):
            known = [
                {self.memories[k].root: each[copy % len(each)]} for k, each in enumerate(roots)
            ]
            every.append(tuple(self._look(node, known[k]) for k, node in self._looks))
        written = [
            (memory, tensor)
            for memory, copies in zip(self.memories, roots, strict=True)
            for tensor in copies
            if memory.is_written
        ]
        return Arguments(every, written)

    def _look(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        """See memory as a node's result."""
        if node not in known:
            overwritten = _overwritten(node, self._values, self._calls)
            if overwritten is not None:
                known[node] = self._look(overwritten, known)
            else:
                args, kwargs = fx.node.map_arg(
                    (node.args, node.kwargs), lambda source: self._look(source, known)
                )
                known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[node]


@dataclass(frozen=True, eq=False)
class Arguments:
    """What to call an op on: each call takes the next of `copies`."""

    copies: list[tuple[Any, ...]]
    _written: list[tuple[Memory, Tensor]]

    def refresh(self) -> None:
        """Fill what the op overwrites anew, so that its numbers grow and shrink only so far."""
        for memory, tensor in self._written:
            memory.refill(tensor)


class Solos:
    """The ops of a captured step, one by one."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        tape = capture.tape
        self._nodes = {node.name: node for node in tape.graph.nodes}
        self._calls = {call.node.name: call for call in tape.calls}
        self._op_of = {name: op for op, names in enumerate(capture.op_nodes) for name in names}
        entries = [entry.value for entry in capture.entries]
        made = [value for call in tape.calls for value in call.makes]
        self._values = {value.node.name: value for value in (*entries, *made)}
        graph = capture.graph
        self._reads: list[list[tuple[int, int]]] = [[] for _ in range(graph.num_ops)]
        for tensor, op, distance in zip(
            graph.use_tensor.tolist(),
            graph.use_op.tolist(),
            use_distances(graph).tolist(),
            strict=True,
        ):
            self._reads[op].append((tensor, distance))

    def distinct(self) -> dict[str, int]:
        """Choose an op for every signature: of those that are called alike, the most common."""
        alike: dict[str, Counter[str]] = {}
        first: dict[tuple[str, str], int] = {}
        for i, signature in enumerate(op_signatures(self.capture.graph)):
            if signature is not None:
                words = self._describe(i)
                alike.setdefault(signature, Counter())[words] += 1
                first.setdefault((signature, words), i)
        return {
            signature: first[signature, counts.most_common(1)[0][0]]
            for signature, counts in alike.items()
        }

    def _describe(self, op: int) -> str:
        def words(node: fx.Node) -> Any:
            return repr(node.meta.get("tensor"))

        nodes = [self._nodes[name] for name in self.capture.op_nodes[op]]
        return repr([(n.target, fx.node.map_arg((n.args, n.kwargs), words)) for n in nodes])

    def build(self, op: int, device: RealDevice) -> Solo:
        """Build one op for a device."""
        outside = self._outside(op)
        writer = _Writer(self._nodes, self._calls, self._values, device, outside)
        nodes = [self._nodes[name] for name in self.capture.op_nodes[op]]
        for node in nodes:
            writer.write(node)
        written = {value.storage for node in nodes for value in self._calls[node.name].writes}
        indices = {
            self._values[node.name].storage: bounds
            for each in nodes
            for node, bounds in find_indices(each)
        }
        makes = tuple(storage for storage in self._makes(op) if writer.has_made(storage))
        memories = []
        for storage, root in writer.roots.items():
            known = outside[storage], storage in written
            if storage not in indices and _is_opaque(root, storage):
                left = self._run_maker(root, storage, device)
                memories.append(Memory(root, left.nbytes, *known, left=left))
            else:
                memories.append(Memory(root, storage.bytes, *known, *indices.get(storage, ())))
        return Solo(
            call=writer.compile(makes),
            makes=makes,
            memories=tuple(memories),
            device=device.torch_device,
            num_calls=len(nodes),
            _looks=tuple(writer.looks),
            _values=self._values,
            _calls=self._calls,
        )

    def _run_maker(self, root: fx.Node, storage: Storage, device: RealDevice) -> Tensor:
        """Run the op that makes a tensor, and give what it leaves there."""
        source = root.args[0]
        assert isinstance(source, fx.Node)
        maker = self.build(self._op_of[source.name], device)
        with below_autograd():
            made = maker.call(*maker.make([1, 1, 1]).copies[0])
        if device.kind == "cuda":
            torch.cuda.synchronize(device.torch_device)  # a lane with its own stream reads it
        left: Tensor = made[maker.makes.index(storage)]
        return left

    def _makes(self, op: int) -> dict[Storage, None]:
        """List the memory whose content an op leaves to others."""
        begin, end = self.capture.graph.op_outputs[op : op + 2]
        labels = [label for label in self.capture.tensor_nodes[begin:end] if label]
        return {self._values[label].storage: None for label in labels}

    def _outside(self, op: int) -> dict[Storage, int]:
        """List the memory that others have made for an op, and how far away it is."""
        found: dict[Storage, int] = {}
        for tensor, distance in self._reads[op]:
            label = self.capture.tensor_nodes[tensor]
            if label:
                storage = self._values[label].storage
                found[storage] = max(found.get(storage, 0), distance)
        return found


class _Writer:
    """Writes an op's calls as straight Python code, as the executor runs them."""

    def __init__(
        self,
        nodes: dict[str, fx.Node],
        calls: dict[str, Call],
        values: dict[str, Value],
        device: RealDevice,
        outside: Iterable[Storage],
    ) -> None:
        self._nodes, self._calls, self._values = nodes, calls, values
        self._device = device
        self._outside = set(outside)
        self._made: dict[Storage, str] = {}  # inside the op
        self._known: dict[fx.Node, str] = {}
        self._names: dict[str, Any] = {}
        self._lines: list[tuple[str, str, list[str]]] = []  # name, text, names that it reads
        self._arguments: dict[fx.Node, str] = {}
        self.roots: dict[Storage, fx.Node] = {}
        self.looks: list[tuple[int, fx.Node]] = []

    def write(self, node: fx.Node) -> str:
        """Write the call of a node; name its result."""
        if name_of(node.target) in CREATORS:
            node_args = fx.node.map_arg((node.args, node.kwargs), self._blank)
            name = self._emit(node, node.target, node_args)
        else:
            name = self._emit(node, kernel_for(node.target, self._device.kind), None)
        self._known[node] = name
        for value in self._calls[node.name].makes:
            if value.parent is None:
                if value.node is not node:
                    self._known[value.node] = self._line(f"{name}[{value.node.args[1]}]", [name])
                self._made[value.storage] = self._known[value.node]
        return name

    def has_made(self, storage: Storage) -> bool:
        """Tell whether what was written makes some memory."""
        return storage in self._made

    def compile(self, wanted: Iterable[Storage]) -> Callable[..., Any]:
        """
        Make a function of what was written.

        It gives back the `wanted`, which it has made, and lets go of the rest after its last use.
        """
        kept = [self._made[storage] for storage in wanted]
        last = {made: k for k, (made, _, _) in enumerate(self._lines)}
        for k, (_, _, reads) in enumerate(self._lines):
            last |= {name: k for name in reads if name in last}
        body = []
        for k, (made, text, _) in enumerate(self._lines):
            gone = [name for name, end in last.items() if end == k and name not in kept]
            body.append(f" {made} = {text}")
            body += [f" del {', '.join(gone)}"] if gone else []
        head = ", ".join(self._arguments.values())
        source = "\n".join(
            [f"def call({head}):", *body, f" return ({''.join(f'{n}, ' for n in kept)})"]
        )
        exec(source, self._names)
        call: Callable[..., Any] = self._names["call"]
        return call

    def _emit(self, node: fx.Node, target: Any, given: Any) -> str:
        """Write a call; `given` replaces the node's own arguments."""
        args, kwargs = (node.args, node.kwargs) if given is None else given
        reads: list[str] = []
        words = [self._word(value, reads) for value in args]
        words += [f"{key}={self._word(value, reads)}" for key, value in kwargs.items()]
        return self._line(f"{self._constant(target)}({', '.join(words)})", reads)

    def _line(self, text: str, reads: list[str]) -> str:
        name = f"r{len(self._lines)}"
        self._lines.append((name, text, reads))
        return name

    def _word(self, value: Any, reads: list[str]) -> str:
        if isinstance(value, fx.Node):
            reads.append(self._resolve(value))
            return reads[-1]
        if isinstance(value, (list, tuple)):
            inside = "".join(f"{self._word(item, reads)}, " for item in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if isinstance(value, torch.device):
            value = self._device.torch_device
        return self._constant(value)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def _blank(self, node: fx.Node) -> Any:
        """Give a tensor of a node's shape: what is made out of nothing needs no more."""
        shape, stride, dtype = node.meta["tensor"]
        return torch.empty_strided(shape, stride, dtype=dtype, device=self._device.torch_device)

    def _resolve(self, node: fx.Node) -> str:
        """Name a node's result, made here or given."""
        if node in self._known:
            return self._known[node]
        overwritten = _overwritten(node, self._values, self._calls)
        root = _root(node, self._values)
        if overwritten is not None:
            name = self._resolve(overwritten)
        elif root.storage in self._made:
            name = self._view(node)
        elif root.storage in self._outside:
            name = self._give(node, root)
        else:
            assert name_of(root.node.target) in CREATORS, f"{root.node} comes from nowhere"
            self.write(root.node)  # made out of nothing by whoever reads it
            return self._resolve(node)
        self._known[node] = name
        return name

    def _view(self, node: fx.Node) -> str:
        """Look at what was made here: that has to happen here as well."""
        if node.target is operator.getitem:
            whole = self._resolve(node.args[0])  # type: ignore[arg-type]
            return self._line(f"{whole}[{node.args[1]}]", [whole])
        return self._emit(node, node.target, None)

    def _give(self, node: fx.Node, root: Value) -> str:
        if root.storage not in self.roots:
            self.roots[root.storage] = root.node
        if node not in self._arguments:
            self._arguments[node] = f"x{len(self._arguments)}"
            self.looks.append(([*self.roots].index(root.storage), node))
        return self._arguments[node]


def _is_opaque(root: fx.Node, storage: Storage) -> bool:
    """
    Tell whether only the op that makes a tensor knows what has to be in it.

    That is a further result of an op beside others, in whole numbers (oneDNN's and cuDNN's
    workspaces, LAPACK's pivots, the bags of an embedding), or of a size that a fake run of the op
    cannot tell.
    """
    dtype = root.meta["tensor"][2]
    is_whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return root.target is operator.getitem and (is_whole or storage.bytes == 0)


def _overwritten(node: fx.Node, values: dict[str, Value], calls: dict[str, Call]) -> fx.Node | None:
    """Find the node whose memory a call has overwritten and gives back; None if it has not."""
    source = node.args[0] if node.target is operator.getitem else node
    call = calls.get(source.name) if isinstance(source, fx.Node) else None
    value = values.get(node.name)
    if call is None or not call.writes or value is None or value.parent is None:
        return None
    return value.parent.node


def _root(node: fx.Node, values: dict[str, Value]) -> Value:
    """Find the value that is all of the memory that a node's result looks at."""
    value = values.get(node.name)
    if value is None:  # several results in one, such as those of `split`
        return _root(node.all_input_nodes[0], values)
    while value.parent is not None:
        value = value.parent
    return value
