"""
From a captured step and a placement to what each device does: one straight line of calls a lane.

A lane is a thread (`placewright.execute._lanes`). This module owns which call runs in
which lane, in which order, on which tensors; and when a tensor goes to another device. It makes
lines of Python source, a name for every tensor, a line for every call, so that running a step costs
little more than the calls themselves (`placewright.execute._source` writes them out).

Rules:

* An op's nodes run on its device, in the order of the plan's sequence.
* A view is made by whoever reads through it, from the memory that it looks at, on the reader's own
  device; so what an in-place op has made of that memory is seen through it.
* A tensor that another device reads is handed over when it is made, and received at its first use
  there. What is resident (a parameter) a GPU fetches where the sequence says so; and what is
  resident on a GPU its lane lends to a CPU there, but not in the middle of a segment.
* What an op makes out of nothing (``zeros``) it makes on its own device.
* A result that something looks at by its strides (`as_strided`) gets those that were captured,
  where a device's kernel has given it others; a view that these do not allow is a copy.
* An op that draws random numbers has a generator seeded by the step and the op's name, so that
  what it draws does not depend on the placement; one that is computed again in the backward pass
  (`torch.utils.checkpoint`) has that of the first time.
* An update reads its optimiser's settings in each step, so that schedules of the learning rate
  work.

Letters: ``N`` ops, ``T`` tensors.
"""

from __future__ import annotations

import operator
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from placewright.carrying import Started
from placewright.execute._lanes import lane_numbers
from placewright.execute._source import Line, Style, count_segments, find_kept, write_lane
from placewright.execute._words import Words
from placewright.execute.devices import RealDevice
from placewright.execute.kernels import (
    STRICT,
    VIEW,
    kernel_for,
    laid_out,
    overwrites_lists,
    seeded,
)
from placewright.frontends._optimizers import LIVE
from placewright.frontends._recorder import Call, Storage, Value
from placewright.frontends._work import CREATORS, name_of
from placewright.frontends.torch import Capture


@dataclass(frozen=True, eq=False)
class Parts:
    """
    Which ops run, in one part or in two with a pause between them, and what is fed and given back.

    Each is a list with an entry for each part: ops; nodes whose values the caller provides (inputs
    in the first part, gradients of what it gave in the second); and nodes whose values it gets.
    """

    ops: tuple[frozenset[int], ...]
    fed: tuple[tuple[str, ...], ...]
    wanted: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Channel:
    """One tensor's way to one device, once a step."""

    source: int
    target: int


@dataclass(frozen=True, eq=False)
class Program:
    """What lanes do: for each part and lane the source of a function, and what its names mean."""

    sources: tuple[dict[int, str], ...]
    names: dict[str, Any]
    residents: dict[str, int]  # device, by node: those that stay from step to step, in order
    views: str  # of residents, made once
    channels: tuple[Channel, ...]
    num_kept: int  # tensors that one part leaves to the next
    recorded: dict[int, int]  # the number of segments, by lane whose segments are replayed
    compiles: bool
    draws: bool  # random numbers


@dataclass(frozen=True)
class _Base:
    """Where a device has a tensor: under a name, from its storage's root or from a view on."""

    name: str
    view: str | None = None  # the node of the view that it is; None: all of the storage


def compile_program(
    capture: Capture,
    placement: Sequence[int],
    sequence: Sequence[Started],
    devices: Sequence[RealDevice],
    parts: Parts,
    *,
    graphs: bool = True,
    compiles: bool = False,
) -> Program:
    """
    Compile a step.

    Parameters
    ----------
    capture
        The step.
    placement
        The device of each op, by its number in `devices`.
    sequence
        The order in which ops and transfers start, as `Timeline.sequence` has it.
    devices
        The devices.
    parts
        Which ops run in which part.
    graphs
        Whether a GPU's segments are recorded as CUDA graphs, where they can be.
    compiles
        Whether PyTorch compiles segments.
    """
    made = _Compiler(capture, placement, devices, parts)
    for op, nodes in enumerate(capture.op_nodes):
        if not nodes and op in parts.ops[0]:
            made.enter(op)
    for part, ops in enumerate(parts.ops):
        made.part = part
        for started in sequence:
            if isinstance(started, tuple):
                made.prefetch(*started)
            elif started in ops and capture.op_nodes[started]:
                made.run(started)
        for lane in [*made.lent]:
            made.lend(lane)
        made.hold()
        made.give()
    return made.finish(graphs, compiles)


def lanes_of(devices: Sequence[RealDevice]) -> list[int]:
    """Give each device its lane: the number of the device whose thread works for it."""
    return lane_numbers([device.name for device in devices], [device.kind for device in devices])


@dataclass(eq=False)
class _Compiler:
    capture: Capture
    placement: Sequence[int]  # [N]
    devices: Sequence[RealDevice]
    parts: Parts
    part: int = 0
    words: Words = field(default_factory=Words)
    residents: dict[str, int] = field(default_factory=dict)
    channels: list[Channel] = field(default_factory=list)

    def __post_init__(self) -> None:
        capture, graph = self.capture, self.capture.graph
        tape = capture.tape
        self.nodes = {node.name: node for node in tape.graph.nodes}
        self.calls: dict[str, Call] = {call.node.name: call for call in tape.calls}
        there = [entry.value for entry in capture.entries]
        there += [value for _, value in tape.constants.values()]
        made = [value for call in tape.calls for value in call.makes]
        self.values: dict[str, Value] = {value.node.name: value for value in (*there, *made)}
        self.inputs = {e.value.node.name for e in capture.entries if e.kind == "input"}
        self.fed = {name: k for names in self.parts.fed for k, name in enumerate(names)}
        self.lane_of = lanes_of(self.devices)
        self.lines: list[dict[int, list[Line]]] = [defaultdict(list) for _ in self.parts.ops]
        self.reads: list[list[int]] = [[] for _ in range(graph.num_ops)]
        for tensor, op in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            self.reads[op].append(tensor)
        self.makes: list[list[int]] = [[] for _ in range(graph.num_ops)]
        for tensor, op in enumerate(graph.tensor_op.tolist()):
            self.makes[op].append(tensor)
        self.readers: dict[int, list[int]] = defaultdict(list)  # ops elsewhere, by tensor
        for op in sorted(frozenset().union(*self.parts.ops)):
            for tensor in self.reads[op]:
                if self.placement[graph.tensor_op[tensor]] != self.placement[op]:
                    self.readers[tensor].append(op)
        self.drawer_of = {  # op that a node is a call of
            name: op for op, names in enumerate(capture.op_nodes) for name in names
        }
        self.op_of = {  # that something is there from, by its node
            node: int(graph.tensor_op[tensor]) for tensor, node in enumerate(capture.tensor_nodes)
        }
        self.held: dict[tuple[int, int], _Base] = {}  # by device and tensor
        self.seen: dict[tuple[int, str, str], str] = {}  # views, by device, base and node
        self.local: dict[Storage, str] = {}  # made by the op that is being written
        self.boxes: dict[tuple[int, int], int] = {}
        self.waiting: dict[tuple[int, int], str | None] = {}  # sent, by device and tensor
        self.coming: set[tuple[int, int]] = set()  # fetched, but not yet waited for
        self.lent: dict[int, list[tuple[int, int, str]]] = defaultdict(list)  # by lane
        written = {value.storage for call in tape.calls for value in call.writes}
        self.strided = {  # memory that is looked at by its strides
            value.storage
            for call in tape.calls
            for value in call.reads
            if call.target in STRICT or (call.target is VIEW and value.storage in written)
        }
        self.numbers: dict[str, int] = {}  # of residents, in their order
        self.views: list[str] = []
        self.draws = False
        self.num_names = 0

    # Lines.

    def fresh(self, letter: str = "r") -> str:
        self.num_names += 1
        return f"{letter}{self.num_names}"

    def emit(
        self,
        device: int,
        text: str,
        reads: Iterable[str] = (),
        makes: str | None = None,
        is_computed: bool = False,
        is_view: bool = False,
        is_opaque: bool = False,
    ) -> None:
        """Write a line: a call that a device computes, or something that its lane does."""
        reads = [*reads]
        kept = tuple(name for name in reads if name[0] == "r")
        stay = tuple(name for name in reads if name[0] != "r")
        text = text if makes is None else f"{makes} = {text}"
        where = device if is_computed else None
        if where is None:  # a segment ends here
            self.lend(self.lane_of[device])
        lane = self.lines[self.part][self.lane_of[device]]
        lane.append(Line(text, kept, makes, where, stay, is_view, is_opaque))

    def compute(
        self, device: int, text: str, reads: Iterable[str], makes: str, is_view: bool = False
    ) -> None:
        """Write a call that a device computes."""
        self.emit(device, text, reads, makes, is_computed=True, is_view=is_view)

    # Values.

    def resolve(self, op: int, device: int, node: fx.Node) -> str:
        """Name a node's value on a device, making views of what is there as needed."""
        value = self.values[node.name]
        chain = [*_chain(value)]
        if value.storage in self.local:
            return self.follow(device, chain[:-1], self.local[value.storage])
        for k, step in enumerate(chain):
            if step.node.name in self.fed and step.node.name not in self.inputs:
                return self.follow(device, chain[:k], self.feed(device, step.node.name))
        base = self.base(op, device, chain)
        if base is None:
            made = self.local[value.storage] = self.fresh()
            self.compute(device, self.creation(device, chain[-1].node), (), made)
            return self.follow(device, chain[:-1], made)
        ends = (k for k, step in enumerate(chain) if step.node.name == base.view)
        return self.follow(device, chain[: next(ends, len(chain) - 1)], base.name)

    def base(self, op: int, device: int, chain: Sequence[Value]) -> _Base | None:
        """Find the tensor through which an op reads a value; None if it makes it itself."""
        found = None
        for tensor in self.reads[op]:
            label = self.capture.tensor_nodes[tensor]
            if not label or self.values[label].storage is not chain[0].storage:
                continue
            base = self.receive(device, tensor)
            if (device, tensor) in self.coming:
                self.coming.remove((device, tensor))
                self.emit(device, f"arrive({self.box(tensor, device)})")
            if base.view is None:
                return base
            if any(step.node.name == base.view for step in chain):
                found = base
        return found

    def follow(self, device: int, steps: Sequence[Value], name: str) -> str:
        """Make views of views, each once for the memory that it looks at."""
        for step in reversed(steps):
            node = step.node
            if node.name in self.calls and self.calls[node.name].writes:
                continue  # it gives back what it has overwritten
            if node.target is operator.getitem:
                several, at = node.args
                assert isinstance(several, fx.Node)
                name = self.view(device, name, several, self.words.viewing(several, name))
                name = self.view(device, name, node, f"{name}[{at}]")
            else:
                name = self.view(device, name, node, self.words.viewing(node, name))
        return name

    def view(self, device: int, base: str, node: fx.Node, text: str) -> str:
        key = device, base, node.name
        if key not in self.seen:
            if base[0] == "r":
                self.seen[key] = self.fresh()
                self.compute(device, text, [base], self.seen[key], is_view=True)
            else:
                self.seen[key] = self.fresh("v")
                self.views.append(f"{self.seen[key]} = {text}")
        return self.seen[key]

    def creation(self, device: int, node: fx.Node) -> str:
        """Write the call that makes a tensor out of nothing."""
        call = self.calls.get(node.name)
        if call is None or name_of(call.target) not in CREATORS:
            raise AssertionError(f"{node} is read before anything has made it")
        return self.words.creation(node, self.devices[device].torch_device)

    # Ops.

    def run(self, op: int) -> None:
        """Write an op's calls, and hand over what others read of it."""
        device = self.placement[op]
        self.local = {}
        for tensor in self.reads[op]:
            maker = int(self.capture.graph.tensor_op[tensor])
            is_here = maker in self.parts.ops[self.part] and self.placement[maker] != device
            if is_here and not self.capture.tensor_nodes[tensor]:
                self.receive(device, tensor)
        for name in self.capture.op_nodes[op]:
            self.call(op, device, self.nodes[name])
        for tensor in self.makes[op]:
            self.settle(op, device, tensor)
        for tensor in self.makes[op]:
            self.send(device, tensor)

    def call(self, op: int, device: int, node: fx.Node) -> None:
        """Write one call and name its results."""
        call, made = self.calls[node.name], self.fresh()
        where = self.devices[device].torch_device
        if name_of(call.target) in CREATORS:
            self.compute(device, self.creation(device, node), (), made)
        else:
            reads: list[str] = []

            def write(value: Any) -> str:
                if isinstance(value, fx.Node):
                    reads.append(self.resolve(op, device, value))
                    return reads[-1]
                if isinstance(value, (list, tuple)):
                    return f"[{', '.join(write(each) for each in value)}]"
                return self.words.literal(value, where)

            live = self.live_settings(call, device)
            words = [write(value) for value in node.args]
            words += [f"{k}={live.get(k) or write(value)}" for k, value in node.kwargs.items()]
            target = seeded(node.target)
            chosen: Any = target or node.target
            if "lr" in live and self.devices[device].kind == "cuda":
                chosen = chosen.overloadpacket.tensor_lr
            if target is not None:
                self.draws = True
                first = self.drawer_of.get(node.meta["draws_as"], op)
                number = zlib.crc32(self.capture.graph.op_names[first].encode())
                words.append(f"generator=generator({number}, {self.words.name(where)})")
            chosen = kernel_for(chosen, self.devices[device].kind)
            text = f"{self.words.name(chosen)}({', '.join(words)})"
            is_computed, is_opaque = target is None, overwrites_lists(node.target)
            self.emit(device, text, reads, made, is_computed=is_computed, is_opaque=is_opaque)
        for value in call.makes:
            if value.parent is not None:
                continue
            self.local[value.storage] = made
            if value.node is not node:
                each = self.local[value.storage] = self.fresh()
                text = f"{made}[{value.node.args[1]}]"
                self.compute(device, text, [made], each, is_view=True)
            self.lay_out(device, value)

    def lay_out(self, device: int, value: Value) -> None:
        """Have a result laid out as it was captured, if something looks at it by its strides."""
        if value.storage not in self.strided:
            return
        given, stride = self.local[value.storage], value.node.meta["tensor"][1]
        made = self.local[value.storage] = self.fresh()
        other = f"{self.words.name(laid_out)}({given}, {stride})"
        text = f"{given} if {given}.stride() == {stride} else {other}"
        self.compute(device, text, [given], made, is_view=True)

    def live_settings(self, call: Call, device: int) -> dict[str, str]:
        """Write what an update reads of its optimiser's settings in each step, by argument."""
        updater = self.capture.updater
        if call.parameter is None or updater is None or "lr" not in call.node.kwargs:
            return {}
        group = self.words.refer(updater.settings[call.parameter])
        fresh = f"{call.parameter!r} in {self.words.refer(updater.fresh)}"
        found = {key: text.format(group) for key, text in LIVE.items()} | {"is_first_step": fresh}
        where = self.devices[device]
        if where.kind == "cuda":  # whose calls may be replayed as they were recorded
            rate = updater.rate_on(call.parameter, where.torch_device)
            found["lr"] = f"{self.words.refer(rate)}.tensor"
        return found

    def settle(self, op: int, device: int, tensor: int) -> None:
        """Note under which name the op's device has one of its tensors."""
        label = self.capture.tensor_nodes[tensor]
        if not label:
            return
        storage = self.values[label].storage
        if storage in self.local:
            self.held[device, tensor] = _Base(self.local[storage])
            return
        for source in self.reads[op]:  # what it has overwritten, and may also read a part of
            there = self.capture.tensor_nodes[source]
            if there and self.values[there].storage is storage:
                base = self.held[device, source]
                if base.view is None:
                    self.held[device, tensor] = base
                    return
        raise AssertionError(f"{self.capture.graph.op_names[op]} does not make {label}")

    def enter(self, op: int) -> None:
        """Note where a parameter, buffer, constant or input is; hand over inputs."""
        device = self.placement[op]
        for tensor in self.makes[op]:
            label = self.capture.tensor_nodes[tensor]
            root = self.root(label) if label else ""
            if root in self.inputs:
                self.held[device, tensor] = _Base(self.feed(device, root))
                self.send(device, tensor)
            elif root:
                self.residents.setdefault(root, device)
                number = self.numbers.setdefault(root, len(self.numbers))
                self.held[device, tensor] = _Base(f"P[{number}]")
            else:
                self.held[device, tensor] = _Base("")

    def feed(self, device: int, name: str) -> str:
        """Take what the caller provides onto a device."""
        key = device, "F", name
        if key not in self.seen:
            self.seen[key] = self.fresh()
            number = self.fed[name]
            text = f"feed({device}, {number}, F[{number}])"
            self.emit(device, text, (), self.seen[key])
        return self.seen[key]

    # From device to device.

    def box(self, tensor: int, target: int) -> int:
        """Number a tensor's way to a device."""
        key = tensor, target
        if key not in self.boxes:
            source = self.placement[self.capture.graph.tensor_op[tensor]]
            self.boxes[key] = len(self.channels)
            self.channels.append(Channel(source, target))
        return self.boxes[key]

    def send(self, device: int, tensor: int) -> None:
        """Hand a tensor over to the devices that read it; a signal only to those of this part."""
        readers = self.readers[tensor]
        if not self.capture.tensor_nodes[tensor]:
            readers = [op for op in readers if op in self.parts.ops[self.part]]
        for target in sorted({self.placement[op] for op in readers}):
            box = self.box(tensor, target)
            if not self.capture.tensor_nodes[tensor]:
                self.emit(device, f"signal({box})")
            else:
                self.waiting[target, tensor] = None
                name = self.sent(device, tensor)
                self.emit(device, f"send({box}, {name})", [name])

    def sent(self, device: int, tensor: int) -> str:
        """Name what is sent: all of a storage, or the view that the tensor is."""
        source = self.placement[self.capture.graph.tensor_op[tensor]]
        base = self.held[source, tensor].name
        if self.is_whole(tensor):
            return base
        chain = [*_chain(self.values[self.capture.tensor_nodes[tensor]])]
        return self.follow(device, chain[:-1], base)

    def is_whole(self, tensor: int) -> bool:
        """Tell whether a tensor is all of its storage, not a smaller view of it."""
        value = self.values[self.capture.tensor_nodes[tensor]]
        return int(self.capture.graph.tensor_bytes[tensor]) >= value.storage.bytes

    def receive(self, device: int, tensor: int) -> _Base:
        """Have a tensor on a device: there already, or received now."""
        key = device, tensor
        if key in self.held:
            return self.held[key]
        label = self.capture.tensor_nodes[tensor]
        maker = int(self.capture.graph.tensor_op[tensor])
        source = self.placement[maker]
        assert source != device, f"{self.capture.graph.op_names[maker]} has not run yet"
        box = self.box(tensor, device)
        if not label:
            if self.capture.op_nodes[maker]:
                self.emit(device, f"wait({box})")
            self.held[key] = _Base("")
            return self.held[key]
        made = self.fresh()
        if key in self.waiting:
            name = self.waiting.pop(key)
            if name is None:
                self.emit(device, f"receive({box})", (), made)
            else:
                self.emit(device, f"accept({box}, {name})", [name], made)
        else:
            name = self.sent(device, tensor)
            self.emit(device, f"fetch({box}, {name})", [name], made)
            if self.devices[device].kind == "cuda":
                self.coming.add(key)
        self.held[key] = _Base(made, None if self.is_whole(tensor) else label)
        return self.held[key]

    def is_resident(self, tensor: int) -> bool:
        """Tell whether a tensor is a parameter, buffer or constant, or a view of one."""
        label = self.capture.tensor_nodes[tensor]
        return bool(label) and self.root(label) in self.residents

    def root(self, label: str) -> str:
        """Name the node that a view looks at in the end."""
        return [*_chain(self.values[label])][-1].node.name

    def prefetch(self, tensor: int, device: int) -> None:
        """Begin to copy what is resident elsewhere, to or from a GPU, and read in this part."""
        maker = int(self.capture.graph.tensor_op[tensor])
        source = self.placement[maker]
        kinds = self.devices[source].kind, self.devices[device].kind
        if "cuda" not in kinds or not self.is_resident(tensor) or self.capture.op_nodes[maker]:
            return
        readers = {op for op in self.readers[tensor] if self.placement[op] == device}
        key = device, tensor
        if not readers & self.parts.ops[self.part] or key in self.held:
            return
        if kinds[1] == "cuda":
            self.receive(device, tensor)
        else:
            self.waiting[key] = None
            name = self.sent(source, tensor)
            self.lent[self.lane_of[source]].append((source, self.box(tensor, device), name))

    def lend(self, lane: int) -> None:
        """Write what a GPU's lane has yet to lend to CPUs; it may be about to wait for them."""
        for source, box, name in self.lent.pop(lane, ()):
            self.emit(source, f"lend({box}, {name})", [name])

    # The end.

    def hold(self) -> None:
        """Take over what was sent but is read in a later part, as it is."""
        for device, tensor in [*self.waiting]:
            if self.waiting[device, tensor] is None:
                made = self.waiting[device, tensor] = self.fresh()
                self.emit(device, f"hold({self.box(tensor, device)})", (), made)

    def give(self) -> None:
        """Give back what the caller wants of a part."""
        graph, nodes = self.capture.graph, self.capture.tensor_nodes
        done = frozenset().union(*self.parts.ops[: self.part + 1])
        last = {
            self.values[label].storage: tensor
            for tensor, label in enumerate(nodes)
            if label and int(graph.tensor_op[tensor]) in done
        }
        for k, name in enumerate(self.parts.wanted[self.part]):
            chain = [*_chain(self.values[name])]
            root = chain[-1].node.name
            tensor = last.get(chain[0].storage)
            if tensor is not None:
                device = self.placement[graph.tensor_op[tensor]]
                base = self.held[device, tensor].name
            elif root in self.op_of:  # a gradient as it was fed
                device = self.placement[self.op_of[root]]
                base = self.feed(device, root)
            else:  # made out of nothing, by whoever reads it
                device, base = 0, self.fresh()
                self.compute(device, self.creation(device, chain[-1].node), (), base)
            made = self.follow(device, chain[:-1], base)
            self.emit(device, f"R[{k}] = give({device}, {made})", [made])

    def finish(self, graphs: bool, compiles: bool) -> Program:
        """Write the functions."""
        kept = find_kept(self.lines)
        recorded = {
            lane: count_segments(lines)
            for lane, lines in self.lines[0].items()
            if graphs and self.can_record(lane)
        }
        sources = tuple(
            {
                lane: write_lane(lines, part, kept, Style(lane in recorded, compiles))
                for lane, lines in lanes.items()
            }
            for part, lanes in enumerate(self.lines)
        )
        return Program(
            sources=sources,
            names=self.words.meanings,
            residents=self.residents,
            views="\n".join(self.views),
            channels=tuple(self.channels),
            num_kept=len(kept),
            recorded=recorded,
            compiles=compiles,
            draws=self.draws,
        )

    def can_record(self, lane: int) -> bool:
        """
        Tell whether a lane's segments can be recorded and replayed.

        It works for one GPU, or one share; a step has one part, for what the first of two leaves to
        the next may be needed after it has run again; and no op has a generator, which is seeded at
        every step.
        """
        is_shared = self.lane_of.count(lane) > 1
        if len(self.parts.ops) > 1 or is_shared or self.devices[lane].kind != "cuda":
            return False
        ops = [op for op in self.parts.ops[0] if self.placement[op] == lane]
        nodes = (self.nodes[name] for op in ops for name in self.capture.op_nodes[op])
        return not any(seeded(node.target) for node in nodes)


def _chain(value: Value) -> Iterator[Value]:
    """Go from a value through what it is a view of to the root of its storage."""
    found: Value | None = value
    while found is not None:
        yield found
        found = found.parent
