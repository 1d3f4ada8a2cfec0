"""
ONNX files become graphs: `read_onnx`.

This module owns these rules, and needs the `onnx` package only once a file is read:

* An initializer is a ``param`` and a ``Constant`` node a ``constant``: an op with a persistent
  output, whose readers read an alias of it. One that nobody reads is left out.
* What is known before the model runs (arithmetic on shapes, for the most part) is computed when
  it is read and becomes no op. A constant of one element, and one that only tells a node its axes
  or sizes, is part of the nodes that read it, as a Python number is in PyTorch.
* A node that only looks at a tensor in another way (``Reshape``, ``Identity`` ...) becomes no op;
  its readers read that tensor.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from placewright.errors import InputError
from placewright.frontends._onnx_file import load_proto, take_apart
from placewright.frontends._onnx_model import (
    Source,
    Type,
    describe,
    kind_of,
    sentence,
    standard_name,
)
from placewright.frontends._onnx_shapes import VIEWS, Shapes
from placewright.frontends._onnx_work import (
    PRICED,
    Call,
    call_of,
    count_bytes,
    count_flops,
    dtype_of,
)
from placewright.graph import Graph
from placewright.graph_file import MAX_DIMS, Op, Output

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, eq=False, kw_only=True)
class OnnxCapture:
    """
    What was read from an ONNX file: the graph to place, and what its times do not rest on.

    `unpriced` are the kinds of ops whose arithmetic is not known, so that only the bytes they move
    are counted. Measure those.
    """

    graph: Graph
    unpriced: tuple[str, ...]  # sorted: ("onnx.NonMaxSuppression",)


def read_onnx(
    path: str | Path, dims: Mapping[str, int] | None = None, name: str | None = None
) -> OnnxCapture:
    """
    Read an ONNX file as the graph of one inference step, without loading its weights.

    Parameters
    ----------
    path
        The file. Weights in files of their own must be where it says.
    dims
        Sizes of the dimensions that the file leaves open, by name: ``{"batch": 8}``. One without
        a name is named by its tensor and axis: ``{"x.0": 8}``.
    name
        The graph's name; the file's, without its ending, if absent.

    Raises
    ------
    InputError
        The file cannot be read or is no valid ONNX model; a dimension is left open; a tensor's
        shape cannot be told before the model runs; or the model has control flow. The message
        names the file and the node, and says what to do.
    """
    path = Path(path)
    model = load_proto(path)
    try:
        source = take_apart(model, path.parent)
        Shapes(source, dims or {}).infer()
        graph = _Folder(source).fold(name or path.stem)
    except (InputError, UnicodeDecodeError, TypeError) as error:
        is_ours = isinstance(error, InputError)
        reason = error if is_ours else "Something in it is not what it should be. Export it again."
        raise InputError(f"The ONNX file `{path}` cannot be used: {reason}") from None
    return OnnxCapture(graph=graph, unpriced=unpriced_kinds(graph))


def unpriced_kinds(graph: Graph) -> tuple[str, ...]:
    """List the kinds of ops in the graph of an ONNX file whose arithmetic is not known, sorted."""
    return tuple(sorted({*graph.op_kinds} - PRICED - {"constant", "input", "param"}))


class _Folder:
    """Makes ops of a source's nodes, inputs and residents."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._entries: list[Op] = []  # inputs and residents
        self._refs: dict[str, str] = {}  # by tensor, as a graph file spells it
        self._taken: dict[str, int] = {}  # names, and the last number added to each
        self._used = {*source.outputs}.union(*(filter(None, node.input) for node in source.nodes))
        self._origins: dict[str, str] = {}  # by tensor: the one that it is only a look at
        self._nodes = [node for node in source.nodes if not self._vanishes(node)]
        self._kept = {self._origin(tensor) for tensor in source.outputs}

    def fold(self, name: str) -> Graph:
        """Build the graph."""
        for value in self.source.inputs:
            held = self.source.types[value.name]
            op = self._claim(value.name)
            self._refs[value.name] = op
            keep = value.name in self._kept
            outputs = (Output(held.bytes, keep=keep, shape=_shape_of(held)),)
            self._entries.append(Op(name=op, kind="input", dtype=held.dtype, outputs=outputs))
        ops = [self._op(node) for node in self._nodes]
        for tensor in self.source.outputs:  # some may be constants that no op reads
            self._ref(tensor, "")
        return Graph.build(name, [*self._entries, *ops])

    def _vanishes(self, node: onnx.NodeProto) -> bool:
        """Tell a node that becomes no op, and note what its readers read instead."""
        if not self._is_view(node):
            return all(tensor in self.source.residents for tensor in node.output if tensor)
        looked, made = self.source.types[node.input[0]], self.source.types[node.output[0]]
        if looked.bytes != made.bytes:
            raise InputError(
                f"{sentence(describe(node))} turns {looked} into {made}, which has another size."
                " Check `dims` and the model."
            )
        self._origins[node.output[0]] = self._origin(node.input[0])
        return True

    def _is_view(self, node: onnx.NodeProto) -> bool:
        """Tell whether a node gives back the bytes it is given."""
        name = standard_name(node)
        if name == "Dropout":
            mode = node.input[2] if len(node.input) > 2 else ""
            is_training = bool(mode) and bool(self.source.values.get(mode, True))
            return not is_training and not any(mask in self._used for mask in node.output[1:])
        if name == "Transpose":
            return _moves_nothing(call_of(node, self.source))
        if name in ("Cast", "CastLike", "Expand"):
            return self.source.types[node.input[0]] == self.source.types[node.output[0]]
        return name in VIEWS

    def _origin(self, tensor: str) -> str:
        return self._origins.get(tensor, tensor)

    def _op(self, node: onnx.NodeProto) -> Op:
        call = call_of(node, self.source)
        module = _module_of(node)
        name = self._claim(node.name)
        tensors = [tensor for tensor in node.output if tensor]
        for k, tensor in enumerate(tensors):
            self._refs[tensor] = f"{name}:{k}" if k else name
        return Op(
            name=name,
            kind=kind_of(node),
            module=module,
            dtype=dtype_of(call),
            inputs=tuple(dict.fromkeys(self._ref(tensor, module) for tensor in call.data)),
            outputs=tuple(
                Output(made.bytes, keep=tensor in self._kept, shape=_shape_of(made))
                for tensor, made in zip(tensors, call.made, strict=True)
            ),
            flops=float(count_flops(call)),
            bytes=float(count_bytes(call)),
        )

    def _ref(self, tensor: str, module: str) -> str:
        """Spell what a reader of `tensor` reads. A resident's op is made for its first reader."""
        tensor = self._origin(tensor)
        if tensor not in self._refs:
            held, seen = self.source.residents[tensor], self.source.types[tensor]
            name, shape = self._claim(held.label), _shape_of(seen)
            op = Op(
                name=name,
                kind=held.kind,
                module=_scope(held.label) or module,
                dtype=seen.dtype,
                outputs=(
                    Output(held.bytes, persistent=True, shape=shape),
                    Output(held.bytes, alias_of=name, shape=shape),
                ),
            )
            self._entries.append(op)
            self._refs[tensor] = f"{name}:1"
        return self._refs[tensor]

    def _claim(self, label: str) -> str:
        """Make a name that a graph can have and no other op has."""
        base, _, digits = label.rpartition(":")
        stem = f"{base}_{digits}" if base and digits.isdecimal() else label
        name, number = stem, self._taken.get(stem, 1)
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken[stem] = number
        self._taken.setdefault(name, 1)
        return name


def _shape_of(held: Type) -> tuple[int, ...] | None:
    return held.shape if len(held.shape) <= MAX_DIMS else None


def _moves_nothing(call: Call) -> bool:
    """Tell whether a transposition leaves dimensions that matter in order."""
    shape = call.read(0).shape
    axes = call.attribute("perm", range(len(shape))[::-1])
    moved = [axis for axis in axes if shape[axis] != 1]
    return moved == sorted(moved) or math.prod(shape) == 0


def _module_of(node: onnx.NodeProto) -> str:
    """Tell the module that a node comes from, as the exporter notes it or as its name does."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            try:
                scopes = ast.literal_eval(entry.value)
            except (SyntaxError, ValueError):
                break
            if isinstance(scopes, list) and len(scopes) > 1:
                return str(scopes[-2])
    return _scope(node.name) if "/" in node.name else ""


def _scope(name: str) -> str:
    """Give what stands before the last part of ``/layers.0/attn/MatMul`` or ``fc.weight``."""
    if "/" in name:
        parts = [part for part in name.split("/") if part][:-1]
        # PyTorch spells the children of a Sequential in full: /features/features.0/features.0.1
        pairs = itertools.zip_longest(parts, parts[1:], fillvalue="")
        return ".".join(part for part, child in pairs if not child.startswith(f"{part}."))
    return "" if "::" in name else name.rpartition(".")[0]
