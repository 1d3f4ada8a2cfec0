"""
The compiled list schedulers: arrays in, arrays out, no state of their own.

This module owns the loops of `placewright.placers.list_scheduling`: earliest start first
(`earliest_start`), insertion into idle gaps (`insertion`), and the two tables that rank ops
(`upward_ranks`, `optimistic_costs`). As in the simulator's kernel nothing is reference-counted, so
nothing is allocated here either, and all is in one file, because Numba's cache notices no other.

Letters: ``N`` ops, ``T`` tensors, ``U`` uses, ``D`` devices, ``M`` units (a co-location group, or
an op that is in none), ``C`` channels, ``G`` gaps, ``S`` stretches of decisions. Times are int64
picoseconds, sizes int64 bytes.

Memory is kept by decision: `State.peak_bytes` has the most that a device held in each stretch of
them. A tensor is sent when it is made, not when its reader runs, so a copy counts from its maker's
stretch on, and weights count in all of them, decisions of the past included.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators, no-check-untyped-defs

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from placewright._compiling import cold, inline, outer

NEVER = np.int64(2**63 - 1)
MAX_GAPS = 256
"""How many idle gaps of a device are remembered; of more, the shortest is forgotten."""
MAX_STRETCHES = 256
"""Into how many stretches the sequence of decisions is cut to keep memory."""
MAX_CHECKS = 64
"""How many pairs whose inputs turn out to come later than hoped are put back at a step."""

Array = np.ndarray[Any, Any]


class Facts(NamedTuple):
    """What a scheduler reads and never changes."""

    op_ps: Array  # [N, D]
    op_unit: Array  # [N]
    op_resident: Array  # [N]
    op_inputs: Array  # [N + 1]
    op_outputs: Array  # [N + 1]
    op_output_bytes: Array  # [N] taken by its outputs
    op_workspace_bytes: Array  # [N]
    input_tensor: Array  # [U] by (op, tensor)
    tensor_uses: Array  # [T + 1]
    use_op: Array  # [U] by (tensor, op)
    tensor_op: Array  # [T]
    tensor_bytes: Array  # [T]
    tensor_root: Array  # [T] for an alias: what it shares its memory with, else -1
    tensor_stays: Array  # [T] whether where it is made nothing is given back for it
    unit_allowed: Array  # [M, D]
    unit_bytes: Array  # [M] persistent
    unit_take_bytes: Array  # [M] outputs and workspace of its largest op
    latency_ps: Array  # [D, D] float64
    byte_ps: Array  # [D, D] float64
    link_begin: Array  # [D * D + 1]
    link_channel: Array  # channels of each link
    capacity_bytes: Array  # [D]


class State(NamedTuple):
    """What a scheduler has decided so far, and what that leaves."""

    unit_device: Array  # [M] or -1
    finish: Array  # [N]
    start: Array  # [N]
    missing: Array  # [N] inputs that are not made yet, resident ones not counted
    copy_at: Array  # [T, D] when a received copy arrives, or -1
    readers: Array  # [T] that have not run; those of aliases too
    live_bytes: Array  # [D]
    peak_bytes: Array  # [D, S]
    stretch: Array  # [N] in which an op was decided
    decisions: Array  # [1] how many
    channel: Array  # [C] free from then on
    trial: Array  # [C] the same, while a pair is tried out


class Queues(NamedTuple):
    """Ready ops by device: heap ``2 d`` of those whose inputs are coming, ``2 d + 1`` the rest."""

    key: Array  # [2 D, N] int64
    rank: Array  # [2 D, N] int32
    size: Array  # [2 D]
    options: Array  # [N] devices on which it still waits
    arrives: Array  # [N] when its inputs could be on any device
    done: Array  # [N]
    free: Array  # [D] device is free from then on
    child: Array  # [D] favourite child of the last op, or -1
    child_arrives: Array  # [D]
    awake_until: Array  # [D]


class Gaps(NamedTuple):
    """Idle time between the ops of each device, in order of time."""

    begin: Array  # [D, G]
    end: Array  # [D, G]
    number: Array  # [D]
    free: Array  # [D] nothing runs from then on


@cold
def _push(keys, ranks, sizes, h, key, rank):
    """Add (`key`, `rank`) to heap `h`."""
    hole = sizes[h]
    sizes[h] = hole + 1
    while hole > 0:
        parent = (hole - 1) // 2
        above = keys[h, parent]
        if above < key or (above == key and ranks[h, parent] <= rank):
            break
        keys[h, hole] = above
        ranks[h, hole] = ranks[h, parent]
        hole = parent
    keys[h, hole] = key
    ranks[h, hole] = rank


@cold
def _pop(keys, ranks, sizes, h):
    """Drop the least entry of heap `h`."""
    size = sizes[h] - 1
    sizes[h] = size
    key = keys[h, size]
    rank = ranks[h, size]
    hole = 0
    while 2 * hole + 1 < size:
        child = 2 * hole + 1
        least = keys[h, child]
        if child + 1 < size:
            other = keys[h, child + 1]
            if other < least or (other == least and ranks[h, child + 1] < ranks[h, child]):
                child += 1
                least = other
        if least > key or (least == key and ranks[h, child] >= rank):
            break
        keys[h, hole] = least
        ranks[h, hole] = ranks[h, child]
        hole = child
    keys[h, hole] = key
    ranks[h, hole] = rank


@inline
def _now(facts, state):
    """Give the stretch of the decision at hand."""
    return np.int64(state.decisions[0]) * state.peak_bytes.shape[1] // facts.op_unit.size


@cold
def _decided(facts, state, i):
    """Op `i` is decided: go on to the next decision."""
    before = _now(facts, state)
    state.stretch[i] = before
    state.decisions[0] += 1
    after = _now(facts, state)
    if after != before and after < state.peak_bytes.shape[1]:
        for d in range(state.live_bytes.size):
            state.peak_bytes[d, after] = state.live_bytes[d]


@inline
def _hold(facts, state, d, size, since):
    """Take `size` bytes of device `d`, from stretch `since` on."""
    state.live_bytes[d] += size
    for s in range(since, _now(facts, state) + 1):
        state.peak_bytes[d, s] += size


@cold
def _roomiest(facts, state, u):
    """Give the device with the most free bytes among those that unit `u` may be on."""
    best = np.int64(-1)
    most = np.int64(0)
    for d in range(facts.op_ps.shape[1]):
        room = facts.capacity_bytes[d]
        for s in range(_now(facts, state) + 1):
            room = min(room, facts.capacity_bytes[d] - state.peak_bytes[d, s])
        if facts.unit_allowed[u, d] and (best < 0 or room > most):
            best = d
            most = room
    return best


@inline
def _home(facts, state, u, d):
    """Tell where unit `u` is, or would be if it were placed for a reader on device `d`."""
    home = np.int64(state.unit_device[u])
    if home < 0:
        home = np.int64(d) if facts.unit_allowed[u, d] else _roomiest(facts, state, u)
    return home


@inline
def _place(facts, state, u, d):
    """Put unit `u` on device `d`, with its weights, unless it has a place."""
    if state.unit_device[u] < 0:
        state.unit_device[u] = d
        if facts.unit_bytes[u] > 0:
            _hold(facts, state, d, facts.unit_bytes[u], 0)


@cold
def _arrival(facts, state, channel, i, d, contended, book):
    """
    Tell when the inputs of op `i` could be on device `d`.

    If `contended`, transfers wait for the channels of their links, one after the other in order of
    tensors, and `channel` is overwritten. If `book`, they happen. Weights that live elsewhere are
    requested when the last other input of the op has been made.
    """
    made = np.int64(0)
    for k in range(facts.op_inputs[i], facts.op_inputs[i + 1]):
        made = max(made, state.finish[facts.tensor_op[facts.input_tensor[k]]])
    latest = np.int64(0)
    for k in range(facts.op_inputs[i], facts.op_inputs[i + 1]):
        t = facts.input_tensor[k]
        maker = facts.tensor_op[t]
        home = _home(facts, state, facts.op_unit[maker], d)
        at = state.finish[maker]
        if home != d:
            if state.copy_at[t, d] >= 0:
                at = state.copy_at[t, d]
            else:
                size = facts.tensor_bytes[t]
                if facts.op_resident[maker]:
                    at = made
                if size == 0:
                    at += np.int64(facts.latency_ps[home, d] + 0.5)
                else:
                    link = home * facts.op_ps.shape[1] + d
                    begin = facts.link_begin[link]
                    beyond = facts.link_begin[link + 1]
                    if contended:
                        for c in range(begin, beyond):
                            at = max(at, channel[facts.link_channel[c]])
                    ps = facts.latency_ps[home, d] + size * facts.byte_ps[home, d]
                    at += max(np.int64(1), np.int64(ps + 0.5))
                    if contended:
                        for c in range(begin, beyond):
                            channel[facts.link_channel[c]] = at
                if book:
                    state.copy_at[t, d] = at
                    now = _now(facts, state)
                    since = now if facts.op_resident[maker] else np.int64(state.stretch[maker])
                    _hold(facts, state, d, size, since)
        latest = max(latest, at)
    return latest


@cold
def _fits(facts, state, i, d):
    """Tell whether device `d` has room for op `i`, its inputs, and the weights it brings along."""
    u = facts.op_unit[i]
    now = _now(facts, state)
    weights = np.int64(0)
    copies = np.int64(0)
    since = now
    fresh = facts.op_output_bytes[i] + facts.op_workspace_bytes[i]
    if state.unit_device[u] < 0:
        weights = facts.unit_bytes[u]
        fresh = facts.unit_take_bytes[u]
    before = np.int64(u)
    for k in range(facts.op_inputs[i], facts.op_inputs[i + 1]):
        t = facts.input_tensor[k]
        maker = facts.tensor_op[t]
        v = np.int64(facts.op_unit[maker])
        if _home(facts, state, v, d) != d:
            if state.copy_at[t, d] < 0:
                copies += facts.tensor_bytes[t]
                if not facts.op_resident[maker]:
                    since = min(since, np.int64(state.stretch[maker]))
        elif state.unit_device[v] < 0 and v != before:
            weights += facts.unit_bytes[v]
        before = v
    if state.live_bytes[d] + weights + copies + fresh > facts.capacity_bytes[d]:
        return False
    for s in range(0 if weights > 0 else since, now + 1):
        level = state.peak_bytes[d, s] + weights
        if s >= since:
            level += copies
        if level > facts.capacity_bytes[d]:
            return False
    return True


@inline
def _give_back(facts, state, t):
    """Give back tensor `t`, which nobody reads any more, wherever it is."""
    home = state.unit_device[facts.op_unit[facts.tensor_op[t]]]
    size = facts.tensor_bytes[t]
    for d in range(facts.op_ps.shape[1]):
        if d == home:
            if not facts.tensor_stays[t]:
                state.live_bytes[d] -= size
        elif state.copy_at[t, d] >= 0:
            state.live_bytes[d] -= size


@cold
def _bring(facts, state, i, d, contended):
    """Place op `i` and its weights for device `d`, fetch its inputs, tell when they are there."""
    _place(facts, state, facts.op_unit[i], d)
    for k in range(facts.op_inputs[i], facts.op_inputs[i + 1]):
        u = facts.op_unit[facts.tensor_op[facts.input_tensor[k]]]
        _place(facts, state, u, _home(facts, state, u, d))
    return _arrival(facts, state, state.channel, i, d, contended, True)


@cold
def _run(facts, state, i, d, start):
    """Run op `i` on device `d`, where its inputs are; give back what it was the last to read."""
    state.start[i] = start
    state.finish[i] = start + facts.op_ps[i, d]
    state.live_bytes[d] += facts.op_output_bytes[i]
    now = _now(facts, state)
    level = state.live_bytes[d] + facts.op_workspace_bytes[i]
    state.peak_bytes[d, now] = max(state.peak_bytes[d, now], level)
    for t in range(facts.op_outputs[i], facts.op_outputs[i + 1]):
        if state.readers[t] == 0 and not facts.tensor_stays[t]:
            state.live_bytes[d] -= facts.tensor_bytes[t]
    for k in range(facts.op_inputs[i], facts.op_inputs[i + 1]):
        t = facts.input_tensor[k]
        state.readers[t] -= 1
        if state.readers[t] == 0:
            _give_back(facts, state, t)
        root = facts.tensor_root[t]
        if root >= 0:
            state.readers[root] -= 1
            if state.readers[root] == 0:
                _give_back(facts, state, root)
    _decided(facts, state, i)


@cold
def _place_rest(facts, state):
    """Place weights that nobody reads."""
    for u in range(facts.unit_bytes.size):
        if state.unit_device[u] < 0:
            _place(facts, state, u, _roomiest(facts, state, u))


@inline
def _slowness(facts, i, d, fastest_ps):
    """Tell how much longer op `i` takes on device `d` than where it is fastest."""
    return facts.op_ps[i, d] - fastest_ps[i]


@cold
def _enter(facts, state, queues, rank, fastest_ps, i):
    """Op `i` is ready: let it wait on every device where it may run."""
    u = facts.op_unit[i]
    latest = np.int64(0)
    for d in range(facts.op_ps.shape[1]):
        fixed = state.unit_device[u]
        if not facts.unit_allowed[u, d] or (fixed >= 0 and fixed != d):
            continue
        at = _arrival(facts, state, state.channel, i, d, False, False)
        latest = max(latest, at)
        queues.options[i] += 1
        key = at + _slowness(facts, i, d, fastest_ps)
        _push(queues.key, queues.rank, queues.size, 2 * d, key, rank[i])
        if queues.child[d] == i:
            queues.child_arrives[d] = at
    queues.arrives[i] = latest


@cold
def _sort_out(facts, queues, op_at, fastest_ps, d):
    """Bring the ops whose inputs are there to the second heap of device `d`; drop those done."""
    key, rank, size = queues.key, queues.rank, queues.size
    while size[2 * d] > 0:
        i = op_at[rank[2 * d, 0]]
        if not queues.done[i]:
            slow = _slowness(facts, i, d, fastest_ps)
            if key[2 * d, 0] - slow > queues.free[d]:
                break
            _push(key, rank, size, 2 * d + 1, slow, rank[2 * d, 0])
        _pop(key, rank, size, 2 * d)
    while size[2 * d + 1] > 0 and queues.done[op_at[rank[2 * d + 1, 0]]]:
        _pop(key, rank, size, 2 * d + 1)


@cold
def _schedule(facts, state, queues, rank, fastest_ps, favourite, favourite_ps, i, d, start):
    """Run op `i` on device `d` from `start`, or from when its inputs are there."""
    start = max(start, queues.free[d], _bring(facts, state, i, d, True))
    _run(facts, state, i, d, start)
    queues.done[i] = True
    queues.free[d] = state.finish[i]
    c = favourite[i]
    queues.child[d] = -1
    queues.awake_until[d] = 0
    if c >= 0 and facts.unit_allowed[facts.op_unit[c], d] and not queues.done[c]:
        where = state.unit_device[facts.op_unit[c]]
        if where < 0 or where == d:
            queues.child[d] = c
            queues.child_arrives[d] = NEVER
            queues.awake_until[d] = state.finish[i] + favourite_ps[i]
    for t in range(facts.op_outputs[i], facts.op_outputs[i + 1]):
        for k in range(facts.tensor_uses[t], facts.tensor_uses[t + 1]):
            j = facts.use_op[k]
            state.missing[j] -= 1
            if state.missing[j] == 0:
                _enter(facts, state, queues, rank, fastest_ps, j)


@outer
def earliest_start(facts, state, queues, rank, op_at, fastest_ps, favourite, favourite_ps, num_ops):
    """
    Schedule the ready pair of op and device that can start first, again and again.

    A pair's key is its start, made later by how much slower than the op's fastest device the
    device is; equal keys go by `rank` ([N], inverse `op_at`), then by device. A device whose last
    op has a `favourite` child ([N], -1 for none) waits for it up to `favourite_ps` ([N]), unless
    the op that comes next could be running anywhere. Starts that were underestimated, because
    channels are busy, are corrected when they come up.
    """
    num_devices = facts.op_ps.shape[1]
    key, ranks, size = queues.key, queues.rank, queues.size
    for i in range(facts.op_unit.size):
        if not facts.op_resident[i] and state.missing[i] == 0:
            _enter(facts, state, queues, rank, fastest_ps, i)
    checks = 0
    while num_ops > 0:
        best_key = NEVER
        best = np.int64(-1)  # op
        where = np.int64(-1)
        heap = np.int64(-1)  # that the op is the first of; -1 if it is a favourite child
        for d in range(num_devices):
            _sort_out(facts, queues, op_at, fastest_ps, d)
            awake = queues.child[d] >= 0 and not queues.done[queues.child[d]]
            for h in range(2 * d, 2 * d + 2):
                if size[h] == 0:
                    continue
                i = op_at[ranks[h, 0]]
                slow = _slowness(facts, i, d, fastest_ps)
                start = key[h, 0] - slow if h == 2 * d else queues.free[d]
                if awake and queues.arrives[i] > start:
                    start = max(start, queues.awake_until[d])
                k = start + slow
                if k < best_key or (k == best_key and rank[i] < rank[best]):
                    best_key = k
                    best = np.int64(i)
                    where = np.int64(d)
                    heap = np.int64(h)
            if awake and queues.child_arrives[d] < NEVER:
                i = queues.child[d]
                k = max(queues.free[d], queues.child_arrives[d])
                k += _slowness(facts, i, d, fastest_ps)
                if k < best_key or (k == best_key and rank[i] <= rank[best]):
                    best_key = k
                    best = np.int64(i)
                    where = np.int64(d)
                    heap = np.int64(-1)
        i = best
        d = where
        fixed = np.int64(state.unit_device[facts.op_unit[i]])
        if (fixed >= 0 and fixed != d) or (fixed < 0 and not _fits(facts, state, i, d)):
            if heap < 0:
                queues.child[d] = -1  # it still waits in a heap
                continue
            _pop(key, ranks, size, heap)
            queues.options[i] -= 1
            if queues.options[i] > 0:
                continue
            if fixed < 0:
                fixed = _roomiest(facts, state, facts.op_unit[i])
            d = fixed
            best_key = 0
        else:
            for c in range(state.channel.size):
                state.trial[c] = state.channel[c]
            at = _arrival(facts, state, state.trial, i, d, True, False)
            slow = _slowness(facts, i, d, fastest_ps)
            if at + slow > best_key and checks < MAX_CHECKS:
                checks += 1
                if heap < 0:
                    queues.child_arrives[d] = at
                else:
                    _pop(key, ranks, size, heap)
                    _push(key, ranks, size, 2 * d, at + slow, rank[i])
                continue
            best_key -= slow
        checks = 0
        num_ops -= 1
        _schedule(facts, state, queues, rank, fastest_ps, favourite, favourite_ps, i, d, best_key)
    _place_rest(facts, state)


@cold
def _find_gap(gaps, d, ready, ps):
    """Find the first gap of device `d` with `ps` left after `ready`; else give their number."""
    low = np.int64(0)
    high = np.int64(gaps.number[d])
    while low < high:
        middle = (low + high) // 2
        if gaps.end[d, middle] < ready + ps:
            low = middle + 1
        else:
            high = middle
    while low < gaps.number[d]:
        if max(gaps.begin[d, low], ready) + ps <= gaps.end[d, low]:
            break
        low += 1
    return low


@cold
def _drop_gap(gaps, d, g):
    """Forget gap `g` of device `d`."""
    for k in range(g, gaps.number[d] - 1):
        gaps.begin[d, k] = gaps.begin[d, k + 1]
        gaps.end[d, k] = gaps.end[d, k + 1]
    gaps.number[d] -= 1


@cold
def _add_gap(gaps, d, g, begin, end):
    """Remember a gap of device `d` before gap `g`; forget the shortest if there are too many."""
    if begin >= end:
        return
    if gaps.number[d] == gaps.begin.shape[1]:
        shortest = 0
        for k in range(gaps.number[d]):
            if gaps.end[d, k] - gaps.begin[d, k] < gaps.end[d, shortest] - gaps.begin[d, shortest]:
                shortest = k
        if end - begin <= gaps.end[d, shortest] - gaps.begin[d, shortest]:
            return
        _drop_gap(gaps, d, shortest)
        if shortest < g:
            g -= 1
    for k in range(gaps.number[d], g, -1):
        gaps.begin[d, k] = gaps.begin[d, k - 1]
        gaps.end[d, k] = gaps.end[d, k - 1]
    gaps.begin[d, g] = begin
    gaps.end[d, g] = end
    gaps.number[d] += 1


@cold
def _fill(gaps, d, g, start, ps):
    """Let an op run on device `d` from `start`: in gap `g`, or after all others."""
    if g < gaps.number[d]:
        begin = gaps.begin[d, g]
        end = gaps.end[d, g]
        _drop_gap(gaps, d, g)
        _add_gap(gaps, d, g, start + ps, end)
        _add_gap(gaps, d, g, begin, start)
    else:
        _add_gap(gaps, d, gaps.number[d], gaps.free[d], start)
        gaps.free[d] = start + ps


@outer
def insertion(facts, state, gaps, keys, ranks, size, rank, op_at, ahead_ps):
    """
    Schedule the ready op of lowest `rank` ([N], inverse `op_at`), again and again.

    It goes where it ends first, `ahead_ps` ([N, D]) added, in the first idle gap that holds it.
    Transfers do not wait for each other. `keys`, `ranks` and `size` are one heap ([1, N]).
    """
    num_devices = facts.op_ps.shape[1]
    for i in range(facts.op_unit.size):
        if not facts.op_resident[i] and state.missing[i] == 0:
            _push(keys, ranks, size, 0, np.int64(0), rank[i])
    while size[0] > 0:
        i = op_at[ranks[0, 0]]
        _pop(keys, ranks, size, 0)
        u = facts.op_unit[i]
        fixed = np.int64(state.unit_device[u])
        where = fixed
        if fixed < 0:
            least = NEVER
            for d in range(num_devices):
                if not facts.unit_allowed[u, d] or not _fits(facts, state, i, d):
                    continue
                ps = facts.op_ps[i, d]
                at = _arrival(facts, state, state.channel, i, d, False, False)
                g = _find_gap(gaps, d, at, ps)
                start = max(at, gaps.begin[d, g] if g < gaps.number[d] else gaps.free[d])
                if start + ps + ahead_ps[i, d] < least:
                    least = start + ps + ahead_ps[i, d]
                    where = np.int64(d)
        if where < 0:
            where = _roomiest(facts, state, u)
        ps = facts.op_ps[i, where]
        at = _bring(facts, state, i, where, False)
        g = _find_gap(gaps, where, at, ps)
        start = max(at, gaps.begin[where, g] if g < gaps.number[where] else gaps.free[where])
        _fill(gaps, where, g, start, ps)
        _run(facts, state, i, where, start)
        for t in range(facts.op_outputs[i], facts.op_outputs[i + 1]):
            for k in range(facts.tensor_uses[t], facts.tensor_uses[t + 1]):
                j = facts.use_op[k]
                state.missing[j] -= 1
                if state.missing[j] == 0:
                    _push(keys, ranks, size, 0, np.int64(0), rank[j])
    _place_rest(facts, state)


@outer
def upward_ranks(facts, mean_ps, tensor_ps, upward):
    """Write to `upward` ([N]) the longest path from each op's start to the end, on average."""
    for i in range(upward.size - 1, -1, -1):
        longest = 0.0
        for t in range(facts.op_outputs[i], facts.op_outputs[i + 1]):
            for k in range(facts.tensor_uses[t], facts.tensor_uses[t + 1]):
                longest = max(longest, tensor_ps[t] + upward[facts.use_op[k]])
        upward[i] = mean_ps[i] + longest


@outer
def downward_ranks(facts, mean_ps, tensor_ps, downward):
    """Write to `downward` ([N]) the longest path to each op's start, on average."""
    for i in range(downward.size):
        longest = 0.0
        for k in range(facts.op_inputs[i], facts.op_inputs[i + 1]):
            t = facts.input_tensor[k]
            maker = facts.tensor_op[t]
            if not facts.op_resident[maker]:
                longest = max(longest, downward[maker] + mean_ps[maker] + tensor_ps[t])
        downward[i] = longest


@outer
def optimistic_costs(facts, tensor_ps, table):
    """Write to `table` ([N, D]) what must follow each op on each device at the least."""
    num_ops, num_devices = table.shape
    for i in range(num_ops - 1, -1, -1):
        for d in range(num_devices):
            table[i, d] = 0
        for t in range(facts.op_outputs[i], facts.op_outputs[i + 1]):
            moving = np.int64(tensor_ps[t] + 0.5)
            for k in range(facts.tensor_uses[t], facts.tensor_uses[t + 1]):
                j = facts.use_op[k]
                allowed = facts.unit_allowed[facts.op_unit[j]]
                elsewhere = NEVER
                for d in range(num_devices):
                    if allowed[d]:
                        elsewhere = min(elsewhere, table[j, d] + facts.op_ps[j, d])
                for d in range(num_devices):
                    follows = elsewhere + moving
                    if allowed[d]:
                        follows = min(follows, table[j, d] + facts.op_ps[j, d])
                    table[i, d] = max(table[i, d], follows)
