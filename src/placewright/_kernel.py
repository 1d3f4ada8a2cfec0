"""
The compiled event loop: arrays in, arrays out, no state of its own.

This module owns the one implementation of the simulator's rules that has to be fast. The rules
are written down in ``docs/simulator.md``; a slow reference in the tests is held equal to it, to
the bit. It is one long file because Numba's cache of compiled code notices changes in no other.

Letters: ``N`` ops, ``T`` tensors, ``U`` uses, ``D`` devices, ``C`` channels, ``Q`` queues,
``R`` resident tensors, ``V`` uses of them, ``B`` placements. Ids are int32, times int64
picoseconds, sizes int64 bytes.

What makes it fast, in the order in which it was found to matter:

* Nothing is reference-counted (``_nrt=False``), so nothing can be allocated either. With counting,
  every helper call touched a shared counter per array and the loop ran at half its speed.
* What is needed of an op when it becomes ready lies in one record of 16 bytes (`OP`), written by
  a sequential pass per placement: the cache line that makes an op ready is the one that starts it.
  That pass reads little: devices with equal times share a column of them.
* A transfer's start and end are known when it is requested, and the ends of one channel's
  transfers never decrease. So transfers wait in one queue per channel, and the next event is the
  least of a few queue heads; there is no heap of events. A transfer that waits for a channel
  starts when another one ends, so starts are no events of their own.
* The inner loops have no branches that depend on the data: a reader is always written behind the
  end of the ready queue, and the end moves by zero or one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from placewright._compiling import cold, inline, outer

NEVER = np.int64(2**63 - 1)
HELD = np.int32(2**30)  # readers of what is never given back
NO_TRANSFER = np.int32(2**31 - 1)

# Fixed, per problem. The last row is a sentinel: row i + 1 ends what row i begins.
EDGES = np.dtype(
    [
        ("outputs", "i4"),
        ("inputs", "i4"),
        ("take", "i8"),  # bytes taken when the op starts
        ("workspace", "i8"),  # bytes of them given back when it ends
    ],
    align=True,
)
TENSOR = np.dtype(
    [
        ("bytes", "i8"),
        ("uses", "i4"),
        ("maker", "i4"),
        ("base", "i4"),  # the tensor it is an alias of, or -1
        ("keep", "i4"),  # 1 or 0
    ],
    align=True,
)
LINK = np.dtype(
    [
        ("latency_ps", "f8"),
        ("ps_per_byte", "f8"),
        ("control_ps", "i8"),  # how long a zero-byte tensor takes
        ("channels", "i4"),
        ("queue", "i4"),
        ("control_queue", "i4"),
    ],
    align=True,
)

# Work space, overwritten by every run.
OP = np.dtype([("missing", "i4"), ("device", "i4"), ("duration", "i8")], align=True)
DEVICE = np.dtype(
    [
        ("end", "i8"),  # of the op that runs, or NEVER
        ("memory", "i8"),
        ("peak", "i8"),
        ("logged", "i8"),  # the memory written to the log last
        ("op", "i4"),
        ("head", "i4"),  # of its part of `ready`
        ("tail", "i4"),
    ],
    align=True,
)
QUEUE = np.dtype([("end", "i8"), ("head", "i4"), ("tail", "i4")], align=True)
CHANNEL = np.dtype([("free", "i8"), ("last", "i8")], align=True)
TRANSFER = np.dtype(
    [
        ("start", "i8"),
        ("end", "i8"),
        ("round", "i8"),  # in which it started
        ("tensor", "i4"),
        ("device", "i4"),
        ("next", "i4"),  # behind it in its queue
        ("blocker", "i4"),  # the transfer it waited for, or -1
        ("freed", "i4"),  # first of the transfers that wait for this one
        ("next_freed", "i4"),
    ],
    align=True,
)
FETCH = np.dtype(
    [
        ("tensor", "i4"),
        ("device", "i4"),
        ("first_reader", "i4"),
        ("last_reader", "i4"),
        ("previous", "i4"),  # the op that runs before the first reader there, or -1
        ("trigger", "i4"),  # op, or -1 for time 0
        ("next", "i4"),  # fetch with the same trigger
    ],
    align=True,
)
STREAM = np.dtype(
    [
        ("held", "i8"),  # bytes of earlier fetches that are still read after the trigger
        ("window", "i8"),
        ("trigger", "i4"),
        ("previous", "i4"),
        ("head", "i4"),
        ("tail", "i4"),
    ],
    align=True,
)
CLOCK = np.dtype(
    [
        ("round", "i8"),
        ("transfers", "i8"),
        ("next_arrival", "i8"),
        ("next_queue", "i8"),
        ("levels", "i8"),
        ("fetches", "i8"),
    ],
    align=True,
)
LEVEL = np.dtype([("time", "i8"), ("bytes", "i8"), ("device", "i8")], align=True)

Array = np.ndarray[Any, Any]


class Fixed(NamedTuple):
    """What a run reads and never changes."""

    edges: Array  # [N + 1] EDGES
    tensor: Array  # [T + 1] TENSOR
    use: Array  # [U] reading op, by (tensor, op)
    input_of: Array  # [U] tensor read, by (op, tensor)
    resident: Array  # [T] a tensor's number among resident ones, or -1
    op_ps: Array  # [N * K] for each of K classes of devices with equal times
    device_class: Array  # [D]
    num_inputs: Array  # [N]
    resident_op: Array  # ops with persistent outputs
    alias: Array  # tensors that are aliases
    resident_use: Array  # [V] op of a use of a resident tensor, by (op, tensor)
    resident_tensor: Array  # [V] tensor of that use
    link: Array  # [D * D + 1] LINK
    link_channel: Array  # channels of each link


class Work(NamedTuple):
    """What a run overwrites, made once and used again."""

    op: Array  # [N] OP
    device: Array  # [D] DEVICE
    queue: Array  # [Q] QUEUE
    channel: Array  # [C] CHANNEL
    transfer: Array  # [U] TRANSFER
    ready: Array  # [N + D] ready ops (`fifo`) or a heap of their ranks, each device its part
    readers: Array  # [T * D] readers left of each tensor's copy on each device
    owner: Array  # [T] for an alias: the tensor whose copy it shares on its maker's device
    fetch: Array  # [V] FETCH
    fetch_at: Array  # [R * D] fetch of a resident tensor on a device, or -1
    first_fetch: Array  # [N] first fetch that an op triggers, or -1
    stream: Array  # [D] STREAM
    stream_heap: Array  # [V] last reader * 2**32 + fetch, each device its part
    clock: Array  # [1] CLOCK


class Order(NamedTuple):
    """The order among ready ops; empty arrays for `fifo`."""

    rank: Array  # [N] or [0]
    op_at: Array  # [N] or [0] inverse of `rank`


class Triggers(NamedTuple):
    """Triggers that replace the default ones."""

    tensor: Array
    device: Array
    op: Array  # -1 for time 0


class Log(NamedTuple):
    """What a recorded run writes; empty arrays for a run that is not."""

    op_start: Array  # [N] or [0]
    op_round: Array  # [N] or [0]
    level: Array  # [2 N + 3 U + D] or [0] LEVEL


@inline
def _sift_up(heap, head, tail, key):
    """Add `key` to the heap ``heap[head:tail]``, which grows by one at its tail."""
    hole = tail
    while hole > head:
        parent = head + (hole - head - 1) // 2
        if heap[parent] <= key:
            break
        heap[hole] = heap[parent]
        hole = parent
    heap[hole] = key


@inline
def _sift_down(heap, head, tail):
    """Drop the least key of the heap ``heap[head:tail]``, which shrinks by one at its tail."""
    size = tail - head - 1
    key = heap[head + size]
    hole = 0
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        if child + 1 < size and heap[head + child + 1] < heap[head + child]:
            child += 1
        if heap[head + child] >= key:
            break
        heap[head + hole] = heap[head + child]
        hole = child
    heap[head + hole] = key


@inline
def _hand_over(fixed, work, order, t, d, counts):
    """Give tensor `t`, now on device `d`, to its readers there; count all readers if `counts`."""
    num_devices = work.device.size
    head = work.device[d].head
    tail = work.device[d].tail
    ranked = order.rank.size > 0
    for u in range(fixed.tensor[t].uses, fixed.tensor[t + 1].uses):
        reader = fixed.use[u]
        where = work.op[reader].device
        if counts:
            work.readers[t * num_devices + where] += 1
        here = where == d
        missing = work.op[reader].missing - here
        work.op[reader].missing = missing
        is_ready = here & (missing == 0)
        if ranked:
            if is_ready:
                _sift_up(work.ready, head, tail, order.rank[reader])
        else:
            work.ready[tail] = reader
        tail += is_ready
    work.device[d].tail = tail


@inline
def _release(fixed, work, t, d):
    """Count one reader less of the copy of tensor `t` on device `d`; the last gives it back."""
    slot = t * work.device.size + d
    left = work.readers[slot] - 1
    work.readers[slot] = left
    work.device[d].memory -= fixed.tensor[t].bytes * (left == 0)


@inline
def _request(fixed, work, now, t, source, target):
    """Book the transfer of tensor `t` from device `source` to device `target`."""
    transfer = work.transfer
    clock = work.clock
    link = fixed.link
    n = clock[0].transfers
    clock[0].transfers = n + 1
    at = source * work.device.size + target
    size = fixed.tensor[t].bytes
    start = now
    blocker = np.int64(-1)
    if size == 0:
        end = now + link[at].control_ps
        q = link[at].control_queue
    else:
        for k in range(link[at].channels, link[at + 1].channels):
            c = fixed.link_channel[k]
            if work.channel[c].free > start:
                start = work.channel[c].free
                blocker = work.channel[c].last
        end = start + max(1, np.int64(link[at].latency_ps + size * link[at].ps_per_byte + 0.5))
        for k in range(link[at].channels, link[at + 1].channels):
            c = fixed.link_channel[k]
            work.channel[c].free = end
            work.channel[c].last = n
        q = link[at].queue
    transfer[n].start = start
    transfer[n].end = end
    transfer[n].tensor = t
    transfer[n].device = target
    transfer[n].next = -1
    transfer[n].blocker = blocker
    transfer[n].freed = -1
    if blocker < 0:
        transfer[n].round = clock[0].round
        work.device[target].memory += size
    else:
        transfer[n].next_freed = transfer[blocker].freed
        transfer[blocker].freed = n
    if work.queue[q].head < 0:
        work.queue[q].head = n
        work.queue[q].end = end
        if end < clock[0].next_arrival:
            clock[0].next_arrival = end
            clock[0].next_queue = q
    else:
        transfer[work.queue[q].tail].next = n
    work.queue[q].tail = n


@inline
def _request_fetch(fixed, work, now, f):
    """Request fetch `f` from where its tensor lives."""
    t = work.fetch[f].tensor
    source = work.op[fixed.tensor[t].maker].device
    _request(fixed, work, now, t, source, work.fetch[f].device)


@inline
def _publish(fixed, work, order, now, t, d):
    """Tensor `t` has been made on device `d`: hand it over there and request it elsewhere."""
    num_devices = work.device.size
    row = t * num_devices
    for e in range(num_devices):
        work.readers[row + e] = 0
    _hand_over(fixed, work, order, t, d, True)
    local = work.readers[row + d]
    if local < fixed.tensor[t + 1].uses - fixed.tensor[t].uses:
        for e in range(num_devices):
            if e != d and work.readers[row + e] > 0:
                _request(fixed, work, now, t, d, e)
                local += 1
    local += fixed.tensor[t].keep
    if fixed.tensor[t].base < 0:
        work.readers[row + d] = local
    else:
        work.readers[work.owner[t] * num_devices + d] += local


@inline
def _end_op(fixed, work, order, streams, now, i, d):
    """Op `i` ends on device `d`: publish its tensors, trigger fetches, give memory back."""
    work.device[d].memory -= fixed.edges[i].workspace
    first, beyond = fixed.edges[i].outputs, fixed.edges[i + 1].outputs
    for t in range(first, beyond):
        _publish(fixed, work, order, now, t, d)
    for t in range(first, beyond):
        if fixed.tensor[t].base < 0 and work.readers[t * work.device.size + d] == 0:
            work.device[d].memory -= fixed.tensor[t].bytes
    if streams:
        f = work.first_fetch[i]
        while f >= 0:
            _request_fetch(fixed, work, now, f)
            f = work.fetch[f].next
    for k in range(fixed.edges[i].inputs, fixed.edges[i + 1].inputs):
        t = fixed.input_of[k]
        if fixed.tensor[t].base >= 0 and work.op[fixed.tensor[t].maker].device == d:
            t = work.owner[t]
        _release(fixed, work, t, d)


@inline
def _end_transfer(fixed, work, order, n):
    """Transfer `n` ends: hand its tensor over, let go of the source, start who waited for it."""
    transfer = work.transfer
    t = transfer[n].tensor
    _hand_over(fixed, work, order, t, transfer[n].device, False)
    source = work.op[fixed.tensor[t].maker].device
    if fixed.tensor[t].base >= 0:
        t = work.owner[t]
    _release(fixed, work, t, source)
    n = transfer[n].freed
    while n >= 0:
        transfer[n].round = work.clock[0].round
        work.device[transfer[n].device].memory += fixed.tensor[transfer[n].tensor].bytes
        n = transfer[n].next_freed


@cold
def _reset(fixed, work, placement):
    """Bring the work space to the state before time 0 for `placement`."""
    num_devices = work.device.size
    num_classes = fixed.op_ps.size // placement.size
    work.clock[0].round = 0
    work.clock[0].transfers = 0
    work.clock[0].next_arrival = NEVER
    work.clock[0].levels = 0
    for d in range(num_devices):
        work.device[d].end = NEVER
        work.device[d].memory = 0
        work.device[d].peak = 0
        work.device[d].logged = -1
        work.device[d].tail = 0
    for q in range(work.queue.size):
        work.queue[q].end = NEVER
        work.queue[q].head = -1
    for c in range(work.channel.size):
        work.channel[c].free = 0
    for i in range(placement.size):
        d = placement[i]
        work.device[d].tail += 1
        work.op[i].device = d
        work.op[i].missing = fixed.num_inputs[i]
        work.op[i].duration = fixed.op_ps[i * num_classes + fixed.device_class[d]]
    begin = np.int32(0)
    for d in range(num_devices):
        size = work.device[d].tail
        work.device[d].head = begin
        work.device[d].tail = begin
        begin += size + 1  # one more: `_hand_over` also writes behind the last


@cold
def _resolve_aliases(fixed, work):
    """Find whose memory each alias shares where it is made: its base's, or that base's base's."""
    for k in range(fixed.alias.size):
        t = fixed.alias[k]
        base = fixed.tensor[t].base
        here = work.op[fixed.tensor[t].maker].device
        shares = fixed.tensor[base].base >= 0 and work.op[fixed.tensor[base].maker].device == here
        work.owner[t] = work.owner[base] if shares else base


@cold
def _find_fetches(fixed, work):
    """List what is fetched in the order of (first reader, tensor), and count its readers."""
    fetch = work.fetch
    num_devices = work.device.size
    work.fetch_at[:] = -1
    for k in range(fixed.resident_tensor.size):
        row = fixed.resident_tensor[k] * num_devices
        work.readers[row : row + num_devices] = 0
    work.first_fetch[:] = -1
    for d in range(num_devices):
        work.stream[d].previous = -1
        work.stream[d].window = 0
        work.stream[d].tail = 0
    num_fetches = np.int32(0)
    for i in range(work.op.size):
        d = work.op[i].device
        for k in range(fixed.edges[i].inputs, fixed.edges[i + 1].inputs):
            t = fixed.input_of[k]
            if fixed.resident[t] < 0 or work.op[fixed.tensor[t].maker].device == d:
                continue
            work.readers[t * num_devices + d] += 1
            at = fixed.resident[t] * num_devices + d
            f = work.fetch_at[at]
            if f < 0:
                f = num_fetches
                num_fetches += 1
                work.fetch_at[at] = f
                fetch[f].tensor = t
                fetch[f].device = d
                fetch[f].first_reader = i
                fetch[f].previous = work.stream[d].previous
                work.stream[d].window = max(work.stream[d].window, 2 * fixed.tensor[t].bytes)
                work.stream[d].tail += 1
            fetch[f].last_reader = i
        if fixed.num_inputs[i] >= 0:
            work.stream[d].previous = i
    work.clock[0].fetches = num_fetches


@cold
def _choose_triggers(fixed, work):
    """Give every fetch its default trigger: as early as its device's window allows."""
    fetch = work.fetch
    stream = work.stream
    heap = work.stream_heap
    begin = np.int32(0)
    for d in range(work.device.size):
        size = stream[d].tail
        stream[d].head = begin
        stream[d].tail = begin
        stream[d].held = 0
        stream[d].trigger = -1
        begin += size
    for f in range(work.clock[0].fetches):
        d = fetch[f].device
        size = fixed.tensor[fetch[f].tensor].bytes
        while size + stream[d].held > stream[d].window:
            soonest = heap[stream[d].head]
            if stream[d].head == stream[d].tail or soonest >> 32 >= fetch[f].first_reader:
                stream[d].trigger = fetch[f].previous
                break
            stream[d].trigger = soonest >> 32  # no fetch in the heap is read before it
            done = soonest & 0xFFFFFFFF
            stream[d].held -= fixed.tensor[fetch[done].tensor].bytes
            _sift_down(heap, stream[d].head, stream[d].tail)
            stream[d].tail -= 1
        fetch[f].trigger = stream[d].trigger
        stream[d].held += size
        key = (np.int64(fetch[f].last_reader) << 32) + f
        _sift_up(heap, stream[d].head, stream[d].tail, key)
        stream[d].tail += 1


@cold
def _attach_fetches(fixed, work, triggers):
    """Let explicit triggers win, then hang every fetch on its trigger, in fetch order."""
    num_devices = work.device.size
    for k in range(triggers.op.size):
        row = fixed.resident[triggers.tensor[k]]
        f = work.fetch_at[row * num_devices + triggers.device[k]]
        work.fetch[f].trigger = triggers.op[k]
    for f in range(work.clock[0].fetches - 1, -1, -1):
        trigger = work.fetch[f].trigger
        if trigger >= 0:
            work.fetch[f].next = work.first_fetch[trigger]
            work.first_fetch[trigger] = f


@cold
def _prepare_fetches(fixed, work, triggers):
    """Set up this placement's fetches; say whether there are any."""
    streams = False
    for k in range(fixed.resident_use.size):
        home = work.op[fixed.tensor[fixed.resident_tensor[k]].maker].device
        streams |= home != work.op[fixed.resident_use[k]].device
    if streams:
        _find_fetches(fixed, work)
        _choose_triggers(fixed, work)
        _attach_fetches(fixed, work, triggers)
    return streams


@cold
def _begin(fixed, work, order, streams):
    """Time 0: sources are ready, resident ops are done, the first fetches are requested."""
    now = np.int64(0)
    num_devices = work.device.size
    for i in range(work.op.size):
        if fixed.num_inputs[i] == 0:
            d = work.op[i].device
            if order.rank.size > 0:
                _sift_up(work.ready, work.device[d].head, work.device[d].tail, order.rank[i])
            else:
                work.ready[work.device[d].tail] = i
            work.device[d].tail += 1
    for k in range(fixed.resident_op.size):
        i = fixed.resident_op[k]
        d = np.int64(work.op[i].device)
        for t in range(fixed.edges[i].outputs, fixed.edges[i + 1].outputs):
            if fixed.resident[t] < 0:
                _publish(fixed, work, order, now, t, d)
                continue
            _hand_over(fixed, work, order, t, d, False)
            work.readers[t * num_devices + d] = HELD
            if fixed.tensor[t].base < 0:
                work.device[d].memory += fixed.tensor[t].bytes
    if streams:
        for f in range(work.clock[0].fetches):
            if work.fetch[f].trigger < 0:
                _request_fetch(fixed, work, now, f)


@inline
def _start_op(fixed, work, order, log, now, d):
    """Start the first ready op of the idle device `d`."""
    device = work.device
    i = work.ready[device[d].head]
    if order.rank.size > 0:
        i = order.op_at[i]
        _sift_down(work.ready, device[d].head, device[d].tail)
        device[d].tail -= 1
    else:
        device[d].head += 1
    device[d].op = i
    device[d].end = now + work.op[i].duration
    device[d].memory += fixed.edges[i].take
    if log.op_start.size > 0:
        log.op_start[i] = now
        log.op_round[i] = work.clock[0].round


@cold
def _log_levels(work, log, now):
    """Write down every device's memory that changed in this round."""
    for d in range(work.device.size):
        if work.device[d].memory != work.device[d].logged:
            work.device[d].logged = work.device[d].memory
            n = work.clock[0].levels
            work.clock[0].levels = n + 1
            log.level[n].time = now
            log.level[n].device = d
            log.level[n].bytes = work.device[d].memory


@inline
def _arrivals(fixed, work, order, now):
    """End every transfer that ends now, by request number."""
    queue = work.queue
    while work.clock[0].next_arrival == now:
        at = work.clock[0].next_queue
        n = queue[at].head
        behind = work.transfer[n].next
        queue[at].head = behind
        queue[at].end = NEVER if behind < 0 else work.transfer[behind].end
        _end_transfer(fixed, work, order, n)
        arrival = NEVER
        lowest = NO_TRANSFER
        for q in range(queue.size):
            end = queue[q].end
            if end < arrival or (end == arrival and queue[q].head < lowest):
                arrival = end
                lowest = queue[q].head
                at = np.int64(q)
        work.clock[0].next_arrival = arrival
        work.clock[0].next_queue = at


@inline
def _run(fixed, work, order, triggers, log, placement):
    """Simulate one step; return the time of the last event."""
    device = work.device
    num_ops = work.op.size
    _reset(fixed, work, placement)
    _resolve_aliases(fixed, work)
    streams = _prepare_fetches(fixed, work, triggers)
    _begin(fixed, work, order, streams)
    now = np.int64(0)
    while True:
        _arrivals(fixed, work, order, now)
        first_end = NEVER
        ending = num_ops  # the op that ends first; of several the lowest
        where = np.int64(0)
        ties = 0
        for d in range(device.size):
            end = device[d].end
            if end == NEVER and device[d].head < device[d].tail:
                _start_op(fixed, work, order, log, now, d)
                end = device[d].end
            if device[d].memory > device[d].peak:
                device[d].peak = device[d].memory
            if end < first_end:
                first_end = end
                ending = device[d].op
                where = d
                ties = 1
            elif end == first_end and end != NEVER:
                ties += 1
                if device[d].op < ending:
                    ending = device[d].op
                    where = d
        if log.level.size > 0:
            _log_levels(work, log, now)
        instant = min(first_end, work.clock[0].next_arrival)
        if instant == NEVER:
            break
        now = instant
        work.clock[0].round += 1
        if first_end == now:
            while True:
                device[where].end = NEVER
                _end_op(fixed, work, order, streams, now, ending, where)
                ties -= 1
                if ties == 0:
                    break
                ending = num_ops
                for d in range(device.size):
                    if device[d].end == now and device[d].op < ending:
                        ending = device[d].op
                        where = d
    return now


@outer
def run_many(fixed, work, orders, triggers, log, placements, makespan_ps, peak_bytes):
    """
    Simulate each row of `placements` ([B, N]), one after the other.

    `orders` holds ranks and their inverses as [1, N] for all rows, [B, N] for each, or [1, 0] for
    `fifo`. `triggers` and `log` are for a single row. Results go to `makespan_ps` ([B]) and
    `peak_bytes` ([B, D]); the transfers of the last row stay in `work`.
    """
    for b in range(placements.shape[0]):
        row = min(b, orders.rank.shape[0] - 1)
        order = Order(orders.rank[row], orders.op_at[row])
        makespan_ps[b] = _run(fixed, work, order, triggers, log, placements[b])
        for d in range(work.device.size):
            peak_bytes[b, d] = work.device[d].peak


@outer
def default_triggers(fixed, work, placement, window_bytes):
    """Fill `work.fetch` with the fetches of `placement` and their default triggers."""
    _reset(fixed, work, placement)
    _find_fetches(fixed, work)
    if window_bytes >= 0:
        for d in range(work.device.size):
            work.stream[d].window = window_bytes
    _choose_triggers(fixed, work)
