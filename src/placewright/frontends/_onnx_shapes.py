"""
Every tensor of an ONNX model gets its type: `Shapes`.

This module owns which sizes are open and how `dims` fills them in, and what is known before the
model runs (arithmetic on shapes, for the most part), which is computed here in the same pass.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from placewright.errors import InputError
from placewright.frontends._onnx_model import (
    KNOWN_ELEMENTS,
    Resident,
    Source,
    Type,
    describe,
    domain_of,
    reason_of,
    sentence,
    standard_name,
    typed,
)

if TYPE_CHECKING:
    import onnx

_COMPUTED = {
    "Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Clip", "Concat", "ConstantOfShape", "CumSum",
    "Div", "Equal", "Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater",
    "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg",
    "NonZero", "Not", "Or", "Pow", "Range", "Reciprocal", "ReduceMax", "ReduceMin", "ReduceProd",
    "ReduceSum", "Reshape", "Round", "ScatterElements", "ScatterND", "Shape", "Sign", "Size",
    "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
}  # fmt: skip
"""What exporters compute shapes, positions and masks with."""

VIEWS = {"BitCast", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"}
"""Gives back the bytes it is given, under another shape or name."""

_KEEPS_SHAPE = {"Dropout", "GroupNormalization", "MeanVarianceNormalization"}
"""Gives back the type it is given, which onnx 1.23 does not infer for every version of these."""


class Shapes:
    """Gives every tensor of a source its type, and the small ones their value where it is known."""

    def __init__(self, source: Source, dims: Mapping[str, int]) -> None:
        self.source = source
        self.dims = {name: _size(name, size) for name, size in dims.items()}
        self._asked: set[str] = set()

    def infer(self) -> None:
        """Fill in `types`, `values` and the residents that turn out to be known."""
        for value in self.source.inputs:
            what = f"input `{value.name}`"
            self.source.types[value.name] = self._resolve(what, value.name, None, value.type)
        for node in self.source.nodes:
            self._add(node)
        named = {
            dim.dim_param
            for kind in self.source.declared.values()
            for dim in kind.tensor_type.shape.dim
        }
        for name in sorted(self.dims.keys() - self._asked - named):
            asked = ", ".join(f"`{known}`" for known in sorted(self._asked)) or "none"
            raise InputError(
                f"`dims` names `{name}`, which is no open dimension of the model. Its open"
                f" dimensions: {asked}."
            )

    def _add(self, node: onnx.NodeProto) -> None:
        source = self.source
        inferred = self._infer(node)
        values = self._compute(node, inferred)
        for tensor in filter(None, node.output):
            if tensor in values:
                code = inferred[tensor].tensor_type.elem_type
                held = typed(sentence(describe(node)), code, values[tensor].shape)
                source.types[tensor], source.values[tensor] = held, values[tensor]
                is_weight = standard_name(node) in VIEWS and self._is_weight(node.input[0])
                kind = "param" if is_weight else "constant"
                source.residents[tensor] = Resident(kind, node.name, held.bytes)
                continue
            source.types[tensor] = self._resolve(
                describe(node), tensor, inferred.get(tensor), source.declared.get(tensor)
            )

    def _infer(self, node: onnx.NodeProto) -> dict[str, onnx.TypeProto]:
        """Ask onnx for the types of what a node makes; they may be incomplete or missing."""
        from onnx import helper, numpy_helper, shape_inference

        source, schema = self.source, self._schema(node)
        if schema is None:
            return {}
        if standard_name(node) == "Split":
            self._check_split(node)
        inputs = [tensor for tensor in node.input if tensor]
        types = {
            tensor: helper.make_tensor_type_proto(
                source.types[tensor].code, source.types[tensor].shape
            )
            for tensor in inputs
        }
        known = {
            tensor: numpy_helper.from_array(source.values[tensor], tensor)
            for tensor in inputs
            if tensor in source.values
        }
        try:
            made = shape_inference.infer_node_outputs(
                schema, node, types, known, opset_imports=_opset_ids(source)
            )
        except Exception as error:  # its own two kinds, and ValueError for a broken attribute
            given = ", ".join(f"`{tensor}` is {source.types[tensor]}" for tensor in inputs)
            raise InputError(
                f"{sentence(describe(node))} cannot work on what it is given: {reason_of(error)}"
                f" ({given}). Check `dims` and the model."
            ) from None
        for tensor in node.output if standard_name(node) in _KEEPS_SHAPE else ():
            if tensor not in made or not made[tensor].tensor_type.HasField("shape"):
                made[tensor] = types[node.input[0]]
        return made

    def _check_split(self, node: onnx.NodeProto) -> None:
        """Refuse counts and sizes that do not fit: onnx would abort the process, or never end."""
        said = {attribute.name: attribute for attribute in node.attribute}
        count = len(node.output)
        if "num_outputs" in said and said["num_outputs"].i != count:
            raise InputError(
                f"{sentence(describe(node))} has `num_outputs` {said['num_outputs'].i}, and outputs"
                f" {count}; expected the same number. Export the model again."
            )
        axis, given = said["axis"].i if "axis" in said else 0, self.source.types.get(node.input[0])
        if given is None or not -len(given.shape) <= axis < len(given.shape):
            return  # which onnx refuses itself
        size = given.shape[axis]
        parts = self._split_sizes(node, size)
        if parts is not None and (len(parts) != count or min(parts) < 0 or sum(parts) != size):
            listed = ", ".join(map(str, parts[:8])) + (", ..." if len(parts) > 8 else "")
            raise InputError(
                f"{sentence(describe(node))} splits dimension {axis} of {given} into [{listed}];"
                f" expected {count} sizes for its {count} outputs, none below zero, that make"
                f" {size} together. Check `dims` and the model."
            )

    def _split_sizes(self, node: onnx.NodeProto, size: int) -> list[int] | None:
        """Give the sizes that a node splits a dimension into; None if they are not known yet."""
        for attribute in node.attribute:
            if attribute.name == "split":
                return [*attribute.ints]
        if len(node.input) > 1 and node.input[1]:
            value = self.source.values.get(node.input[1])
            if value is None or value.dtype.kind != "i":
                return None
            return [*map(int, value.ravel())]
        count = len(node.output)
        part = -(-size // count)
        return [part] * (count - 1) + [size - part * (count - 1)]

    def _schema(self, node: onnx.NodeProto) -> onnx.defs.OpSchema | None:
        """Find what onnx knows of a node's op."""
        from onnx import defs

        domain = domain_of(node.domain)
        try:
            return defs.get_schema(node.op_type, self.source.opsets.get(domain, 1), domain)
        except defs.SchemaError:
            return None

    def _compute(
        self, node: onnx.NodeProto, inferred: Mapping[str, onnx.TypeProto]
    ) -> dict[str, NDArray[Any]]:
        """Compute what a node makes, if it is small and all that decides it is known."""
        from onnx import helper

        name = standard_name(node)
        shapes = [made.tensor_type.shape.dim for made in inferred.values()]
        sizes = [math.prod(dim.dim_value for dim in shape) for shape in shapes]
        if name not in _COMPUTED or max(sizes, default=0) > KNOWN_ELEMENTS:
            return {}
        feeds: dict[str, Any] = {}
        for k, tensor in enumerate(node.input):
            if name in ("Shape", "Size") or (name == "CastLike" and k == 1):
                held = self.source.types[tensor]  # which is all that these take of it
                kind = helper.tensor_dtype_to_np_dtype(held.code)
                feeds[tensor] = np.broadcast_to(np.zeros((), kind), held.shape)
            elif tensor in self.source.values and (name in VIEWS or not self._is_weight(tensor)):
                feeds[tensor] = self.source.values[tensor]
            elif tensor:
                return {}
        return _run(node, feeds, self.source)

    def _is_weight(self, tensor: str) -> bool:
        """Tell weights, which stay what they are in a small model too, from settings."""
        resident, held = self.source.residents.get(tensor), self.source.types[tensor]
        return (
            resident is not None
            and resident.kind == "param"
            and held.dtype not in ("bool", "int32", "int64")
            and held.elements > 1
        )

    def _resolve(
        self, what: str, tensor: str, inferred: onnx.TypeProto | None, said: onnx.TypeProto | None
    ) -> Type:
        """Make a type of what onnx infers, what the file says, and what `dims` gives."""
        kinds = [kind.tensor_type for kind in (inferred, said) if kind is not None]
        shapes = [[*kind.shape.dim] for kind in kinds if kind.HasField("shape")]
        code = next((kind.elem_type for kind in kinds if kind.elem_type), 0)
        if not shapes or code == 0:
            raise InputError(
                f"{sentence(what)} makes `{tensor}`, a tensor with no shape or type that could be"
                " told before it runs. Add it to the model's `value_info`, or export the model"
                " with standard ops and tensors only."
            )
        # Inference knows `dims`, so it wins over what was written into the file without them.
        shapes = [shape for shape in shapes if len(shape) == len(shapes[0])]
        sizes = [
            self._dimension(what, tensor, axis, [shape[axis] for shape in shapes])
            for axis in range(len(shapes[0]))
        ]
        return typed(f"{sentence(what)}, tensor `{tensor}`,", code, sizes)

    def _dimension(self, what: str, tensor: str, axis: int, told: Sequence[Any]) -> int:
        for dim in told:
            if dim.HasField("dim_value") and dim.dim_value >= 0:
                return int(dim.dim_value)
        name = next((dim.dim_param for dim in told if dim.dim_param), f"{tensor}.{axis}")
        self._asked.add(name)
        if name not in self.dims:
            of = what if what == f"input `{tensor}`" else f"`{tensor}`, made by {what},"
            raise InputError(
                f"Dimension {axis} (`{name}`) of {of} is open. Give its size:"
                f' `dims={{"{name}": 1}}`, or `--dim {name}=1` on the command line.'
            )
        return self.dims[name]


def _size(name: str, size: Any) -> int:
    try:
        number = operator.index(size)
    except TypeError:
        number = -1
    if number < 0 or isinstance(size, bool):
        raise InputError(
            f"`dims` gives `{name}` the size {size!r}; expected a whole number that is not"
            " negative."
        )
    return number


def _opset_ids(source: Source) -> list[onnx.OperatorSetIdProto]:
    from onnx import helper

    return [helper.make_opsetid(name, version) for name, version in source.opsets.items()]


def _run(node: onnx.NodeProto, feeds: dict[str, Any], source: Source) -> dict[str, NDArray[Any]]:
    """Run one node on the host. One that cannot be run has no known value, which is all right."""
    import onnx
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    outputs = [output for output in node.output if output]
    graph = onnx.GraphProto(name="node", node=[node])
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in feeds)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            model = helper.make_model(graph, opset_imports=_opset_ids(source))
            made = ReferenceEvaluator(model).run(None, feeds)
    except Exception:
        return {}
    return {name: np.asarray(value) for name, value in zip(outputs, made, strict=True)}
