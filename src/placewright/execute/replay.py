"""
A plan as its devices run it: `Replay`, and the constants that it is run with.

This module owns what the executor does and the simulator does not:

* Ops run in the order of the plan, whatever becomes ready first.
* A tensor from one CPU device to another is copied by the receiver, before its first reader there,
  and the receiver computes nothing meanwhile. The link's latency is what it takes to wake up, so
  a receiver that finds the tensor made has none. A weight that was just copied is in the reader's
  cache, where its op does not find it otherwise: that takes less, as far as it reads the weight,
  but never by more than the copy took.
* One thread issues what all GPUs do (for a share of a GPU, its own). It waits for what another
  thread sends and takes some time for every tensor that comes or goes; a GPU begins nothing before
  it was issued. What arrives for its next op is copied before that, what leaves is copied beside
  computing. A link to or from a GPU carries one tensor after the other; its latency passes
  meanwhile, and what arrives while the GPU still computes has none.
* A CPU device takes as long for every tensor that it exchanges with a GPU, and puts what it sends
  into pinned memory. It computes nothing meanwhile. Parameters go ahead, both ways, from where the
  plan says so; what arrives at a GPU then waits until its link is free.
* Cores that idle leave memory and caches to the others. Where nothing at all is on a GPU, the
  processor has the core that would have worked for it.

Letters: ``D`` devices, ``R`` rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from placewright._compiling import kept
from placewright.costs import PS_PER_S, Costs
from placewright.execute._lanes import lane_numbers
from placewright.graph import BoolArray, FloatArray, IdArray
from placewright.timeline import Timeline

RULES = 7
"""The version of what follows; constants that were fitted to another one mean something else."""

MOST_CACHED = 0.5
"""What an op takes less if a weight is in the cache is at most this share of its time."""

SENT, RECEIVED, BEGUN = range(3)
"""What happens to a tensor in a row."""


class KindConstants(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ops take on a kind of device."""

    op_factor: float = 1.0  # on op times
    op_overhead_s: float = 0.0  # beside it, for every op that takes time


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is fitted; by itself, nothing beyond op times and links."""

    kinds: Mapping[str, KindConstants] = {}  # by kind of device
    transfer_overhead_s: float = 0.0  # beside a link's latency, for every transfer,
    weights_overhead_s: float = 0.0  # and for every weight, which nobody has just made
    copy_factor: float = 1.0  # on a transfer's bytes by the link's bandwidth,
    weights_factor: float = 1.0  # and on those of weights: nobody's cache has just been given them
    step_overhead_s: float = 0.0  # once a step
    wake_factor: float = 1.0  # on a link's latency
    hand_over_s: float = 0.0  # of a thread, for every tensor between a CPU and a GPU
    staging_factor: float = 0.0  # of a transfer to a GPU's time, that its CPU takes to prepare it
    idle_factor: float = 1.0  # on what a core's ops gain while others idle
    cached_factor: float = 0.0  # of a weight's time on its link, that its reader takes less


@dataclass(frozen=True, eq=False, kw_only=True)
class Replay:
    """
    A plan, reduced to where devices send and receive, in the order of the plan.

    Between two rows a device just works on, so all that is needed of its ops, up to there, is their
    times' sum, their number, and what they would gain in all if the other cores idled.
    """

    kinds: tuple[str, ...]  # [D]
    lane: IdArray  # [D] the device whose thread works for it
    device: IdArray  # [R] that sends or receives
    other: IdArray  # [R] the other end
    what: IdArray  # [R] `SENT`, `RECEIVED`, or `BEGUN`: a parameter goes ahead
    sender: IdArray  # [R] of what is received, the row in which it was sent or begun; or -1
    work: FloatArray  # [R, 3] the device's before it: seconds, ops, seconds to gain
    latency_s: FloatArray  # [R] zero where there is nothing to copy, unless a core waits
    copy_s: FloatArray  # [R] bytes by bandwidth
    reader_s: FloatArray  # [R] what the op takes that something is received for
    total_work: FloatArray  # [D, 3]

    @classmethod
    def of(cls, timeline: Timeline, costs: Costs | None = None) -> Replay:
        """Reduce a simulated plan; with other op times, if these are given, in the same order."""
        return _reduce(timeline, timeline.problem.costs if costs is None else costs)

    def time_s(self, constants: Constants) -> float:
        """Give how long a step takes."""
        scale = np.array(
            [
                (each.op_factor, each.op_overhead_s, 0.0)
                for each in (constants.kinds.get(kind, KindConstants()) for kind in self.kinds)
            ]
        )
        time_s = self._run(constants, scale)
        is_cpu = np.array([kind == "cpu" for kind in self.kinds])
        if constants.idle_factor * self.total_work[:, 2].sum() > 0 and time_s > 0:
            scale[:, 2] = -constants.idle_factor * self._idle(is_cpu, scale, time_s)
            time_s = self._run(constants, scale)
        return time_s + constants.step_overhead_s

    def _idle(self, is_cpu: BoolArray, scale: FloatArray, time_s: float) -> FloatArray:  # [D]
        """
        Tell how much of what they can gain while others idle a device's ops do gain.

        Op times are those with all cores at work. Where other cores are known to idle for a part of
        the step, an op gains, on average, that part. A processor beside GPUs gains all or nothing.
        """
        if is_cpu.sum() == 1:
            is_alone = not len(self.device) and not self.total_work[~is_cpu].any()
            return np.where(is_cpu, float(is_alone), 0.0)
        work_s = (self.total_work * scale).sum(axis=1)
        others_s = (work_s[is_cpu].sum() - work_s) / max(is_cpu.sum() - 1, 1)
        return np.where(is_cpu, 1 - np.minimum(others_s / time_s, 1.0), 0.0)

    def _run(self, constants: Constants, scale: FloatArray) -> float:
        """Go from row to row; `scale` is on each device's work, [D, 3]."""
        time_s: float = _go(
            np.array([kind == "cuda" for kind in self.kinds]),
            self.lane,
            self.device,
            self.other,
            self.what,
            self.sender,
            self.work,
            self.latency_s,
            self.copy_s,
            self.reader_s,
            self.total_work,
            scale,
            (constants.transfer_overhead_s, constants.copy_factor),
            (constants.weights_overhead_s, constants.weights_factor),
            constants.wake_factor,
            constants.staging_factor,
            constants.hand_over_s,
            constants.cached_factor,
        )
        return time_s


@kept(nogil=True)
def _go(
    is_gpu: Any,  # [D]
    lane: Any,  # [D]
    device: Any,  # [R], as are those that follow
    other: Any,
    what: Any,
    sender: Any,
    works: Any,  # [R, 3]
    latency_s: Any,
    copy_s: Any,
    reader_s: Any,
    total: Any,  # [D, 3]
    scale: Any,  # [D, 3] on work
    per_tensor: Any,  # seconds more, and times those of its bytes
    per_weight: Any,
    wake_factor: float,
    staging_factor: float,
    hand_over_s: float,
    cached_factor: float,
) -> float:
    """Give when the last device is done; all times in seconds."""
    num_devices, num_rows = len(is_gpu), len(device)
    waited = np.zeros(num_devices)  # by each CPU so far
    issued = np.zeros(num_devices)  # all that the GPUs of a lane were told so far
    told = np.zeros(num_rows)  # when a lane has sent what another one waits for
    done = np.zeros(num_devices)  # when each GPU is
    worked = np.zeros(num_devices)  # by each GPU up to then
    free = np.zeros((num_devices, num_devices))  # when a link to or from a GPU is
    there = np.zeros(num_rows)  # when what was sent or begun can be received
    for r in range(num_rows):
        d, o = device[r], other[r]
        work = _weigh(works[r], scale[d])
        latency, copy, hand_over = wake_factor * latency_s[r], 0.0, 0.0
        if copy_s[r] > 0:
            is_weight = what[r] == BEGUN or (what[r] == RECEIVED and sender[r] < 0)
            more_s, factor = per_weight if is_weight else per_tensor
            copy, hand_over = more_s + factor * copy_s[r], hand_over_s
        if is_gpu[d]:
            n = lane[d]
            if work > worked[d]:
                done[d] = max(done[d], issued[n]) + work - worked[d]
                worked[d] = work
            if what[r] == SENT:
                issued[n] += hand_over
                told[r] = issued[n]
                there[r] = max(done[d], issued[n])
                if copy > 0:
                    free[d, o] = max(there[r], free[d, o]) + copy
                    there[r] = free[d, o] + latency
            elif what[r] == BEGUN:  # fetched ahead
                issued[n] += hand_over
                free[o, d] = max(done[d], issued[n], free[o, d]) + copy
                there[r] = free[o, d] + latency
            elif what[sender[r]] == BEGUN:
                done[d] = max(done[d], there[sender[r]])
            elif is_gpu[o]:
                if lane[o] != n:
                    issued[n] = max(issued[n], told[sender[r]]) + hand_over
                done[d] = max(done[d], issued[n], there[sender[r]])
            else:
                issued[n] = max(issued[n], there[sender[r]]) + hand_over
                done[d] = max(done[d], issued[n] + latency)
                if copy > 0:
                    done[d] = free[o, d] = max(done[d], free[o, d]) + copy
            continue
        if what[r] == BEGUN:  # lent ahead
            issued[lane[o]] += hand_over
            free[o, d] = max(issued[lane[o]], free[o, d]) + copy
            there[r] = free[o, d] + latency
            continue
        now = work + waited[d]
        if what[r] == SENT:
            if is_gpu[o]:
                waited[d] += hand_over + staging_factor * copy_s[r]
            there[r] = work + waited[d]
            continue
        ready = 0.0 if sender[r] < 0 else there[sender[r]]
        if is_gpu[o]:
            end = max(now, ready) + hand_over
        else:
            end = (ready + latency if ready > now else now) + copy
            if sender[r] < 0:
                end -= min(cached_factor * copy_s[r], MOST_CACHED * reader_s[r], copy)
        waited[d] += end - now
    last = 0.0
    for d in range(num_devices):
        if is_gpu[d]:
            left = _weigh(total[d], scale[d]) - worked[d]
            end = max(done[d], issued[lane[d]]) + left if left > 0 else done[d]
        else:
            end = _weigh(total[d], scale[d]) + waited[d]
        last = max(last, end)
    return last


@kept(nogil=True)
def _weigh(work: Any, scale: Any) -> Any:  # [3]
    return work[0] * scale[0] + work[1] * scale[1] + work[2] * scale[2]


def _reduce(timeline: Timeline, costs: Costs) -> Replay:
    """Walk through a plan's ops in their order and note what they send and receive."""
    problem = timeline.problem
    graph, cluster = problem.graph, problem.cluster
    place = timeline.candidate.placement
    times_s = costs.op_ps[np.arange(graph.num_ops), place] / PS_PER_S
    gains_s = np.zeros(graph.num_ops)
    if costs.idle_gain_ps is not None:
        gains_s = costs.idle_gain_ps[np.arange(graph.num_ops), place] / PS_PER_S
    target = place[graph.use_op]
    away = target != place[graph.tensor_op[graph.use_tensor]]
    goes = np.zeros((graph.num_tensors, cluster.num_devices), dtype=np.bool_)
    goes[graph.use_tensor[away], target[away]] = True
    rows = np.empty(2 * int(goes.sum()), dtype=_ROW)
    is_cpu = np.array([kind == "cpu" for kind in cluster.device_kinds])
    total = np.zeros((cluster.num_devices, 3))
    num_rows = _walk(
        timeline.sequence,
        timeline.transfers.tensor,
        timeline.transfers.target,
        is_cpu,
        place,
        times_s,
        gains_s,
        graph.use_tensor[graph.input_order],
        graph.op_inputs,
        graph.tensor_op,
        graph.op_outputs,
        graph.op_is_resident,
        goes,
        rows,
        total,
    )
    rows = rows[:num_rows]
    device, other, what = rows["device"].copy(), rows["other"].copy(), rows["what"].copy()
    source, target = np.where(what == SENT, [device, other], [other, device])
    size = graph.tensor_bytes[rows["tensor"]]
    has_latency = (size > 0) | (is_cpu[source] & is_cpu[target])
    return Replay(
        kinds=cluster.device_kinds,
        lane=np.array(lane_numbers(cluster.device_names, cluster.device_kinds), dtype=np.int32),
        device=device,
        other=other,
        what=what,
        sender=rows["sender"].copy(),
        work=np.stack([rows["work_s"], rows["num_ops"], rows["gain_s"]], axis=1),
        latency_s=np.where(has_latency, cluster.latency_s[source, target], 0.0),
        copy_s=np.where(size > 0, size / cluster.bytes_per_s[source, target], 0.0),
        reader_s=rows["reader_s"].copy(),
        total_work=total,
    )


_ROW = np.dtype(
    [
        ("device", np.int32),
        ("other", np.int32),
        ("sender", np.int32),
        ("tensor", np.int32),
        ("what", np.int32),
        ("work_s", np.float64),
        ("num_ops", np.float64),
        ("gain_s", np.float64),
        ("reader_s", np.float64),
    ],
    align=True,
)
"""A row of a `Replay`, and the tensor that goes."""


@kept(nogil=True)
def _walk(
    order: Any,  # ops and transfers as they start
    moved: Any,  # tensors of transfers
    target: Any,  # devices of transfers
    is_cpu: Any,  # [D]
    place: Any,  # [N]
    times_s: Any,  # [N]
    gains_s: Any,  # [N]
    inputs: Any,  # tensors, op by op
    begins: Any,  # [N + 1] in `inputs`
    maker: Any,  # [T]
    outputs: Any,  # [N + 1] in tensors
    is_resident: Any,  # [N]
    goes: Any,  # [T, D]
    rows: Any,
    total: Any,  # [D, 3]
) -> int:
    """Write rows, and all work of each device into `total`; give their number."""
    num_ops = len(place)
    sent = np.full(goes.shape, -1, dtype=np.int32)  # row
    is_there = np.zeros(goes.shape, dtype=np.bool_)
    n = 0
    for each in order:
        if each >= num_ops:
            tensor, d = moved[each - num_ops], target[each - num_ops]
            source = place[maker[tensor]]
            if is_resident[maker[tensor]] and not (is_cpu[d] and is_cpu[source]):
                sent[tensor, d] = n
                _write(rows[n], d, source, BEGUN, -1, tensor, total[d], 0.0)
                n += 1
            continue
        d = place[each]
        for k in range(begins[each], begins[each + 1]):
            tensor = inputs[k]
            source = place[maker[tensor]]
            if source != d and not is_there[tensor, d]:
                is_there[tensor, d] = True
                _write(
                    rows[n], d, source, RECEIVED, sent[tensor, d], tensor, total[d], times_s[each]
                )
                n += 1
        if times_s[each] > 0:
            total[d, 0] += times_s[each]
            total[d, 1] += 1
            total[d, 2] += gains_s[each]
        if not is_resident[each]:
            for tensor in range(outputs[each], outputs[each + 1]):
                for t in range(goes.shape[1]):
                    if goes[tensor, t]:
                        sent[tensor, t] = n
                        _write(rows[n], d, t, SENT, -1, tensor, total[d], 0.0)
                        n += 1
    return n


@kept(nogil=True)
def _write(
    row: Any,
    device: int,
    other: int,
    what: int,
    sender: int,
    tensor: int,
    work: Any,
    reader_s: float,
) -> None:
    row["device"], row["other"], row["what"] = device, other, what
    row["sender"], row["tensor"] = sender, tensor
    row["work_s"], row["num_ops"], row["gain_s"] = work
    row["reader_s"] = reader_s
