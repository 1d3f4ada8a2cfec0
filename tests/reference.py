"""
The simulator's rules, again, as plainly as possible: lists, dicts and sets, no cleverness.

It shares no code with the kernel. Where the two differ, `docs/simulator.md` decides who is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from placewright.problem import Problem


@dataclass
class Block:
    """Memory taken on a device, with everything that still needs it."""

    device: int
    size: int
    holders: set = field(default_factory=set)


@dataclass
class Transfer:
    number: int
    tensor: int
    source: int
    target: int
    start: int
    end: int
    has_started: bool = False
    has_ended: bool = False


@dataclass
class Result:
    makespan: int = 0
    op_start: dict = field(default_factory=dict)
    op_end: dict = field(default_factory=dict)
    transfers: list = field(default_factory=list)
    peak: list = field(default_factory=list)
    levels: list = field(default_factory=list)  # per device {time: bytes at the end of that time}
    triggers: dict = field(default_factory=dict)
    sequence: list = field(default_factory=list)


class Reference:
    def __init__(
        self, problem: Problem, placement, discipline="fifo", priorities=None, triggers=None
    ):
        self.problem, self.graph, self.cluster = problem, problem.graph, problem.cluster
        self.placement = [int(d) for d in placement]
        self.discipline, self.priorities = discipline, priorities
        self.num_devices = problem.num_devices
        graph = self.graph
        self.ops = range(graph.num_ops)
        self.outputs = {i: [] for i in self.ops}
        for t in range(graph.num_tensors):
            self.outputs[int(graph.tensor_op[t])].append(t)
        self.readers = {t: [] for t in range(graph.num_tensors)}
        self.inputs = {i: [] for i in self.ops}
        for t, i in zip(graph.use_tensor.tolist(), graph.use_op.tolist(), strict=True):
            self.readers[t].append(i)
            self.inputs[i].append(t)
        self.resident_ops = {
            i for i in self.ops if any(graph.tensor_persistent[t] for t in self.outputs[i])
        }
        self.readers_by_device = {}
        for t, readers in self.readers.items():
            for i in readers:
                self.readers_by_device.setdefault((t, self.placement[i]), []).append(i)
        self.fetches = [self.find_fetches(device) for device in range(self.num_devices)]
        self.result = Result()
        self.result.triggers = self.default_triggers() | dict(triggers or {})

    # -- fetches -----------------------------------------------------------------------------

    def home(self, t):
        return self.placement[int(self.graph.tensor_op[t])]

    def is_resident(self, t):
        return bool(self.graph.tensor_persistent[t]) or (
            self.graph.tensor_base[t] >= 0 and int(self.graph.tensor_op[t]) in self.resident_ops
        )

    def readers_on(self, t, device):
        return self.readers_by_device.get((t, device), [])

    def find_fetches(self, device):
        """(first reader, tensor) of everything fetched to a device, in that order."""
        return sorted(
            (self.readers_on(t, device)[0], t)
            for t in self.readers
            if self.is_resident(t) and self.home(t) != device and self.readers_on(t, device)
        )

    def default_triggers(self, window=None):
        triggers = {}
        for device in range(self.num_devices):
            fetches = self.fetches[device]
            if not fetches:
                continue
            size = {t: int(self.graph.tensor_bytes[t]) for _, t in fetches}
            limit = 2 * max(size.values()) if window is None else window
            runs_here = [
                i for i in self.ops if self.placement[i] == device and i not in self.resident_ops
            ]
            previous = -1
            for k, (first, t) in enumerate(fetches):
                before = [e for e in runs_here if e < first]
                fits = [
                    e
                    for e in [-1, *before]
                    if e >= previous
                    and size[t]
                    + sum(size[g] for _, g in fetches[:k] if self.readers_on(g, device)[-1] > e)
                    <= limit
                ]
                previous = fits[0] if fits else (before[-1] if before else -1)
                triggers[t, device] = previous
        return triggers

    # -- memory ------------------------------------------------------------------------------

    def take(self, block):
        self.memory[block.device] += block.size
        self.result.peak[block.device] = max(
            self.result.peak[block.device], self.memory[block.device]
        )

    def drop(self, block, holder):
        block.holders.remove(holder)
        if not block.holders:
            self.memory[block.device] -= block.size

    def block_of(self, t, device):
        """The memory that a reader of `t` on `device` uses: an alias made there uses its base's."""
        base = int(self.graph.tensor_base[t])
        if base >= 0 and self.home(t) == device:
            return self.block_of(base, device)
        return self.blocks[t, device]

    # -- events ------------------------------------------------------------------------------

    def request(self, t, target):
        graph, cluster = self.graph, self.cluster
        source = self.home(t)
        size = int(graph.tensor_bytes[t])
        latency_ps = float(cluster.latency_s[source, target]) * 1e12
        start = self.now
        if size == 0:
            end = start + round(latency_ps)
        else:
            channels = cluster.link_channels[source * self.num_devices + target]
            start = max([start, *(self.channel_free.get(c, 0) for c in channels)])
            ps_per_byte = 1e12 / float(cluster.bytes_per_s[source, target])
            end = start + max(1, int(latency_ps + size * ps_per_byte + 0.5))
            for c in channels:
                self.channel_free[c] = end
        transfer = Transfer(len(self.result.transfers), t, source, target, start, end)
        self.result.transfers.append(transfer)
        self.under_way.append(transfer)
        copy = Block(target, size, {("reader", i, t) for i in self.readers_on(t, target)})
        self.blocks[t, target] = copy
        self.block_of(t, source).holders.add(("transfer", transfer.number))

    def give(self, t, device):
        for i in self.readers_on(t, device):
            self.missing[i].discard(t)
            if not self.missing[i]:
                self.ready[device].append(i)

    def end_op(self, i):
        device = self.placement[i]
        self.running[device] = None
        if i not in self.resident_ops:
            self.drop(self.workspaces[i], "running")
        for t in self.outputs[i]:
            block = self.block_of(t, device)
            block.holders |= {("reader", r, t) for r in self.readers_on(t, device)}
            if self.graph.tensor_keep[t] or self.is_resident(t):
                block.holders.add("kept")
        for t in self.outputs[i]:
            self.give(t, device)
            if not self.is_resident(t):
                for target in range(self.num_devices):
                    if target != device and self.readers_on(t, target):
                        self.request(t, target)
        for t in self.outputs[i]:
            if self.graph.tensor_base[t] < 0 and i not in self.resident_ops:
                self.drop(self.blocks[t, device], "running")
        for _, t in self.fetches[device]:
            if self.result.triggers[t, device] == i:
                self.request(t, device)
        for t in self.inputs[i]:
            self.drop(self.block_of(t, device), ("reader", i, t))

    def end_transfer(self, transfer):
        transfer.has_ended = True
        self.give(transfer.tensor, transfer.target)
        self.drop(self.block_of(transfer.tensor, transfer.source), ("transfer", transfer.number))

    def start_transfer(self, transfer):
        transfer.has_started = True
        self.take(self.blocks[transfer.tensor, transfer.target])
        self.result.sequence.append(("transfer", transfer.number))

    def start_op(self, device):
        ready = self.ready[device]
        if self.discipline == "fifo":
            i = ready[0]
        elif self.discipline == "program":
            i = min(ready)
        else:
            i = min(ready, key=lambda i: (-self.priorities[i], i))
        ready.remove(i)
        self.running[device] = i
        self.result.op_start[i] = self.now
        self.result.op_end[i] = self.now + int(self.problem.costs.op_ps[i, device])
        self.workspaces[i] = Block(device, int(self.graph.op_workspace_bytes[i]), {"running"})
        self.take(self.workspaces[i])
        for t in self.outputs[i]:
            if self.graph.tensor_base[t] < 0:
                self.blocks[t, device] = Block(device, int(self.graph.tensor_bytes[t]), {"running"})
                self.take(self.blocks[t, device])
        self.result.sequence.append(("op", i))

    def run(self):
        result = self.result
        self.now = 0
        self.memory = [0] * self.num_devices
        result.peak = [0] * self.num_devices
        result.levels = [{} for _ in range(self.num_devices)]
        self.blocks, self.workspaces, self.channel_free = {}, {}, {}
        self.under_way = []  # transfers requested and not over
        self.running = [None] * self.num_devices
        self.ready = [[] for _ in range(self.num_devices)]
        self.missing = {i: set(self.inputs[i]) for i in self.ops}
        for i in self.ops:
            if i not in self.resident_ops and not self.inputs[i]:
                self.ready[self.placement[i]].append(i)
        for i in sorted(self.resident_ops):
            for t in self.outputs[i]:
                if self.graph.tensor_base[t] < 0:
                    self.blocks[t, self.placement[i]] = Block(
                        self.placement[i], int(self.graph.tensor_bytes[t]), {"kept"}
                    )
                    self.take(self.blocks[t, self.placement[i]])
        for i in sorted(self.resident_ops):
            result.op_start[i] = result.op_end[i] = 0
            self.end_op(i)
        at_zero = [
            (first, t, device)
            for device in range(self.num_devices)
            for first, t in self.fetches[device]
            if result.triggers[t, device] == -1
        ]
        for _, t, device in sorted(at_zero):
            self.request(t, device)
        while True:
            while self.round():
                pass
            for device in range(self.num_devices):
                result.levels[device][self.now] = self.memory[device]
            later = [result.op_end[i] for i in self.running if i is not None]
            later += [x.end for x in self.under_way]
            later += [x.start for x in self.under_way if not x.has_started]
            if not later:
                break
            self.now = min(later)
        result.makespan = max(
            (result.op_end[i] for i in self.ops if i not in self.resident_ops), default=0
        )
        return result

    def round(self):
        """One pass over everything that can happen now; says whether anything did."""
        changed = False
        ending = [i for i in self.running if i is not None and self.result.op_end[i] == self.now]
        for i in sorted(ending):
            self.end_op(i)
            changed = True
        for transfer in self.under_way:
            if transfer.end == self.now and not transfer.has_ended:
                self.end_transfer(transfer)
                changed = True
        for transfer in self.under_way:
            if transfer.start == self.now and not transfer.has_started:
                self.start_transfer(transfer)
                changed = True
        self.under_way = [transfer for transfer in self.under_way if not transfer.has_ended]
        for device in range(self.num_devices):
            if self.running[device] is None and self.ready[device]:
                self.start_op(device)
                changed = True
        return changed


def simulate(problem, placement, discipline="fifo", priorities=None, triggers=None) -> Result:
    return Reference(problem, placement, discipline, priorities, triggers).run()
