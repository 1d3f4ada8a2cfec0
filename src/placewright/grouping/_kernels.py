"""
The compiled loops of the groupings: arrays in, arrays out.

This module owns what has to be fast when a graph has 100,000 ops. A graph of groups comes as two
lists of neighbours: those of group ``g`` are ``before[before_begins[g]:before_begins[g + 1]]``,
which it waits for, and likewise ``after``, which wait for it.
"""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-untyped-calls, no-check-untyped-defs

from __future__ import annotations

import heapq

import numpy as np

from placewright._compiling import kept


@kept()
def _find(parent, x):
    while parent[x] != x:
        parent[x] = parent[parent[x]]
        x = parent[x]
    return x


@kept()
def merge_sole_consumers(order, begins, readers):
    """
    Merge each group into the only other one that reads it; sweep until nothing changes.

    Only the readers of a merged group's root matter: those of what was merged into it are inside.
    """
    parent = np.arange(len(order))
    changed = True
    while changed:
        changed = False
        for g in order:
            if parent[g] != g:
                continue
            only = -1
            for e in range(begins[g], begins[g + 1]):
                reader = _find(parent, readers[e])
                if reader in (g, only):
                    continue
                if only >= 0:
                    only = -2
                    break
                only = reader
            if only >= 0:
                parent[g] = only
                changed = True
    for g in range(len(parent)):
        parent[g] = _find(parent, g)
    return parent


@kept()
def find_levels(before_begins, after_begins, after):
    """Give each node of an acyclic graph the length of the longest path that leads to it."""
    count = len(before_begins) - 1
    level = np.zeros(count, np.int64)
    missing = np.empty(count, np.int64)
    queue = np.empty(count, np.int64)
    tail = 0
    for x in range(count):
        missing[x] = before_begins[x + 1] - before_begins[x]
        if missing[x] == 0:
            queue[tail] = x
            tail += 1
    head = 0
    while head < tail:
        x = queue[head]
        head += 1
        for e in range(after_begins[x], after_begins[x + 1]):
            y = after[e]
            level[y] = max(level[y], level[x] + 1)
            missing[y] -= 1
            if missing[y] == 0:
                queue[tail] = y
                tail += 1
    return level


@kept()
def _is_other_at(parent, level, begins, neighbours, x, besides, at):
    for e in range(begins[x], begins[x + 1]):
        y = neighbours[e]
        if y != besides and level[_find(parent, y)] == at:
            return True
    return False


@kept()
def _unite(duty, kinds, left, right):
    """Let two groups share a device from now on, if one of its kinds may run both."""
    a, b = _find(duty, left), _find(duty, right)
    if a == b:
        return True
    if kinds[a] & kinds[b] == 0:
        return False
    duty[b] = a
    kinds[a] &= kinds[b]
    return True


@kept()
def match(
    left, right, is_free, level, before_begins, before, after_begins, after,
    time, cap, group_duty, duty, kinds, limit,
):  # fmt: skip
    """
    Contract candidate pairs in the order given, each group at most once, without a circle.

    `level` rises along every edge, and it still does after each contraction, which proves that no
    circle appears. An edge that rises by one can be contracted to the level of its left end if its
    right end has no other input from there, or to that of its right end if its left end has no
    other reader there. The right end of a free pair waits for nothing and nothing for it.

    `duty` is a union-find over what has to share a device; a pair that no device kind may run both
    of is left alone.
    """
    parent = np.arange(len(level))
    is_matched = np.zeros(len(level), np.bool_)
    merges = 0
    for k in range(len(left)):
        if merges == limit:
            break
        u, v = left[k], right[k]
        if is_free[k]:
            root = _find(parent, u)
            if parent[v] != v or root == v or time[root] + time[v] > cap:
                continue
            if _unite(duty, kinds, group_duty[root], group_duty[v]):
                parent[v] = root
                time[root] += time[v]
                merges += 1
            continue
        if is_matched[u] or is_matched[v] or level[v] != level[u] + 1 or time[u] + time[v] > cap:
            continue
        at = level[u]
        if _is_other_at(parent, level, before_begins, before, v, u, level[u]):
            if _is_other_at(parent, level, after_begins, after, u, v, level[v]):
                continue
            at = level[v]
        if not _unite(duty, kinds, group_duty[u], group_duty[v]):
            continue
        parent[v] = u
        time[u] += time[v]
        level[u] = at
        is_matched[u] = is_matched[v] = True
        merges += 1
    for g in range(len(parent)):
        parent[g] = _find(parent, g)
    return parent


@kept()
def _topological_order(before_begins, after_begins, after):
    """Order the nodes, the lowest number that is ready first."""
    count = len(before_begins) - 1
    missing = before_begins[1:] - before_begins[:-1]
    ready = [x for x in range(count) if missing[x] == 0]  # sorted, so a heap
    order = np.empty(count, np.int64)
    for k in range(count):
        x = heapq.heappop(ready)
        order[k] = x
        for e in range(after_begins[x], after_begins[x + 1]):
            y = after[e]
            missing[y] -= 1
            if missing[y] == 0:
                heapq.heappush(ready, y)
    return order


@kept()
def cut_stretches(before_begins, after_begins, after, time, group_duty, duty, kinds, num_groups):
    """Merge neighbours in a topological order, the pair of least time first."""
    order = _topological_order(before_begins, after_begins, after)
    count = len(order)
    sums = time[order]
    following = np.arange(1, count + 1)
    preceding = np.arange(-1, count - 1)
    parent = np.arange(count)  # of places in the order
    version = np.zeros(count, np.int64)
    heap = [(sums[i] + sums[i + 1], i, np.int64(0)) for i in range(count - 1)]
    heapq.heapify(heap)
    left_over = count
    while left_over > num_groups and len(heap) > 0:
        _, i, stamp = heapq.heappop(heap)
        j = following[i]
        if parent[i] != i or stamp != version[i] or j == count:
            continue
        if not _unite(duty, kinds, group_duty[order[i]], group_duty[order[j]]):
            continue
        parent[j] = i
        sums[i] += sums[j]
        following[i] = following[j]
        if following[i] < count:
            preceding[following[i]] = i
            version[i] += 1
            heapq.heappush(heap, (sums[i] + sums[following[i]], i, version[i]))
        if preceding[i] >= 0:
            h = preceding[i]
            version[h] += 1
            heapq.heappush(heap, (sums[h] + sums[i], h, version[h]))
        left_over -= 1
    label = np.empty(count, np.int64)
    for k in range(count):
        label[order[k]] = _find(parent, k)
    return label
