"""
A captured step on real devices: `PlacedStep`, which `apply`, `TrainStep` and measuring share.

This module owns what a plan means for a captured step, and the check that it can be run here: the
same model, devices that exist, memory that is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from placewright.carrying import Placing, Started, check_made_for
from placewright.errors import InputError
from placewright.execute._probe_memory import available_bytes
from placewright.execute.devices import Lanes, find_devices, torch_device_of
from placewright.execute.program import Parts, compile_program
from placewright.execute.residents import Residents
from placewright.execute.runtime import Runner
from placewright.frontends.torch import Capture
from placewright.plan import Plan
from placewright.timeline import Timeline
from placewright.units import format_bytes


class PlacedStep:
    """
    A captured step of a module, with each op on a device of this machine.

    The module's parameters and buffers are moved to where the plan wants them, in place: they stay
    the module's own.

    Parameters
    ----------
    capture
        The step.
    module
        The module that was captured, with real weights.
    placement
        The device of each op, by its number in `device_names`.
    sequence
        The order in which ops and transfers start.
    device_names
        Names of devices of this machine.
    parts
        What runs; by default the whole step at once, giving the loss and the outputs.
    graphs
        Whether adjacent ops of a GPU are replayed as CUDA graphs, from the third step on. Only
        where the step has one part, and no op that draws random numbers is on the GPU.
    compiles
        Whether PyTorch compiles adjacent ops of a device, on the first step. That takes seconds to
        minutes.
    """

    def __init__(
        self,
        capture: Capture,
        module: torch.nn.Module,
        placement: Sequence[int],
        sequence: Sequence[Started],
        device_names: Sequence[str],
        parts: Parts | None = None,
        *,
        lanes: Lanes | None = None,
        shared: Residents | None = None,
        graphs: bool = True,
        compiles: bool = False,
    ) -> None:
        self.capture, self.module = capture, module
        self.parts = parts or whole_step(capture)
        self._lanes = lanes
        self.devices = find_devices(tuple(device_names))
        self.program = compile_program(
            capture, placement, sequence, self.devices, self.parts, graphs=graphs, compiles=compiles
        )
        self.settle(shared or Residents(module))

    def settle(self, shared: Residents) -> None:
        """Put what stays where it is to be; again if somebody has moved or replaced it."""
        program, devices = self.program, self.devices
        fetched = {c.source for c in program.channels if devices[c.target].kind == "cuda"}
        self.residents = shared.settle(self.capture, program.residents, devices, fetched)
        self.runner = Runner(program, devices, self.residents, self._lanes)
        self._places: dict[tuple[str, ...] | None, frozenset[int]] = {}

    def places_of(self, nodes: tuple[str, ...] | None) -> frozenset[int]:
        """Tell where the memory of what stays begins: of some nodes, or of all; kept till moved."""
        found = self._places.get(nodes)
        if found is None:
            held = self.residents
            some = (held[node] for node in (held if nodes is None else nodes) if node in held)
            found = frozenset(each.untyped_storage().data_ptr() for each in some)
            self._places[nodes] = found
        return found

    @classmethod
    def of_timeline(
        cls,
        capture: Capture,
        module: torch.nn.Module,
        timeline: Timeline,
        parts: Parts | None = None,
        **options: Any,
    ) -> PlacedStep:
        """Place a step as it was simulated."""
        cluster = timeline.problem.cluster
        placement = timeline.candidate.placement.tolist()
        sequence, names = sequence_of(timeline), cluster.device_names
        return cls(capture, module, placement, sequence, names, parts, **options)

    @classmethod
    def of_plan(
        cls,
        capture: Capture,
        module: torch.nn.Module,
        plan: Plan,
        parts: Parts | None = None,
        **options: Any,
    ) -> PlacedStep:
        """
        Place a step as a plan says.

        Raises
        ------
        InputError
            The plan is for another model, for devices that are not here, or needs more memory than
            there is.
        """
        placing = placing_of(plan, capture)
        names = placing.device_names
        return cls(capture, module, placing.placement, placing.sequence, names, parts, **options)

    def run(
        self,
        fed: Sequence[Tensor],
        part: int = 0,
        kept: list[Any] | None = None,
        seed: int | None = None,
    ) -> list[Tensor]:
        """Run a part with the values of its fed nodes; give those of its wanted ones."""
        return self.runner.run(part, fed, len(self.parts.wanted[part]), kept, seed)

    def close(self) -> None:
        """End the threads that worked for this step."""
        self.runner.close()


def placing_of(plan: Plan, capture: Capture) -> Placing:
    """
    Read a plan by the numbers of a captured step.

    Raises
    ------
    InputError
        The plan is for another model, for devices that are not here, or needs more memory than
        there is.
    """
    check_made_for(plan, capture.graph)
    check_room(plan)
    return Placing.of_plan(plan, capture.graph)


def sequence_of(timeline: Timeline) -> list[Started]:
    """Give the order in which a simulated step's ops and transfers started."""
    count, moves = timeline.problem.graph.num_ops, timeline.transfers
    return [
        k if k < count else (int(moves.tensor[k - count]), int(moves.target[k - count]))
        for k in timeline.sequence.tolist()
    ]


def whole_step(capture: Capture, gives_gradients: bool = False) -> Parts:
    """Run all of a step: the inputs are fed; the loss, if there is one, and outputs come back."""
    fed = tuple(e.value.node.name for e in capture.entries if e.kind == "input")
    cut = capture.cut
    wanted = ([] if cut.loss is None else [cut.loss]) + [*cut.outputs]
    if gives_gradients:
        wanted += cut.parameter_gradients
    ops = frozenset(range(capture.graph.num_ops))
    return Parts((ops,), (fed,), (tuple(wanted),))


def check_room(plan: Plan) -> None:
    """
    Check that this machine has a plan's devices, and free memory for it.

    Raises
    ------
    InputError
        A device is not here, or less of its memory is free than the plan needs.
    """
    used = tuple(dict.fromkeys(plan.devices.values()))
    devices = find_devices(used)
    needs: dict[str, int] = {}
    for device in devices:
        where = str(device.torch_device)
        needs[where] = needs.get(where, 0) + plan.predicted.peak_bytes.get(device.name, 0)
    for where, need in needs.items():
        free = free_bytes(where)
        if need > free:
            raise InputError(
                f"Plan `{plan.name}` needs {format_bytes(need)} on `{where}`, of which"
                f" {format_bytes(free)} are free. Free some, or make a plan for less memory."
            )


def free_bytes(where: str) -> int:
    """Give what is free of a device's memory now."""
    if where != "cpu":
        return int(torch.cuda.mem_get_info(torch_device_of(where))[0])
    return available_bytes()
