"""
ONNX files become checked models: `load_proto`, then `take_apart`.

This module owns what a file must be to be used. It needs the `onnx` package only once a file is
read. Weights in files of their own are checked for length and not loaded, except small ones.
"""

from __future__ import annotations

import graphlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from placewright.errors import InputError
from placewright.frontends._onnx_model import (
    KNOWN_ELEMENTS,
    STRING,
    Resident,
    Source,
    Type,
    describe,
    domain_of,
    kind_of,
    reason_of,
    sentence,
    typed,
)

if TYPE_CHECKING:
    import onnx

_CONSTANTS = {
    "value": "t", "sparse_value": "sparse_tensor", "value_int": "i", "value_ints": "ints",
    "value_float": "f", "value_floats": "floats", "value_string": "s", "value_strings": "strings",
}  # fmt: skip
"""Where the value of a ``Constant`` node is, by the name of its attribute."""


@dataclass(frozen=True, eq=False)
class _Stored:
    """An initializer, or the value of a ``Constant`` node."""

    tensor: str
    kind: str  # "param" or "constant"
    label: str
    content: Any  # a TensorProto or a SparseTensorProto

    def __str__(self) -> str:
        return f"{'Initializer' if self.kind == 'param' else 'Constant'} `{self.label}`"


def load_proto(path: Path) -> onnx.ModelProto:
    """Read an ONNX file, without weights that are in files of their own."""
    _require_onnx()
    import onnx

    try:
        if path.exists() and not path.is_file():
            raise InputError(f"Expected an ONNX file at `{path}`, but that is no file.")
        model = onnx.load(path, format="protobuf", load_external_data=False)
    except FileNotFoundError:
        raise InputError(f"There is no ONNX file at `{path}`. Check the path.") from None
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"The ONNX file `{path}` cannot be read: {reason}.") from None
    except InputError:
        raise
    except Exception as error:  # protobuf has its own, which mypy cannot see
        raise InputError(
            f"`{path}` is not an ONNX file, or is cut off ({reason_of(error)}). Export it again."
        ) from None
    if not model.HasField("graph") or not model.opset_import:
        raise InputError(
            f"`{path}` is not an ONNX file, or is cut off: it has no graph or no opset. Export it"
            " again."
        )
    return model


def _require_onnx() -> None:
    try:
        import onnx  # noqa: F401
    except ImportError:
        raise InputError(
            "onnx is not installed, and reading an ONNX file needs it. Install it with"
            " `pip install 'placewright[onnx]'`."
        ) from None


def take_apart(model: onnx.ModelProto, folder: Path) -> Source:
    """
    Check a model and take it apart.

    Parameters
    ----------
    model
        What `load_proto` gives. Nodes without a name get one.
    folder
        Where weights in files of their own are.
    """
    model = _inline(model)
    graph = model.graph
    for i, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{i}"
    declared = (*graph.value_info, *graph.output)
    source = Source(
        nodes=[node for node in graph.node if kind_of(node) != "onnx.Constant"],
        inputs=[*graph.input],
        outputs=[value.name for value in graph.output],
        declared={v.name: v.type for v in declared if v.type.tensor_type.HasField("shape")},
        opsets={domain_of(opset.domain): opset.version for opset in model.opset_import},
    )
    for stored in _stored(graph):
        _hold(source, stored, folder)
    source.inputs = [value for value in source.inputs if value.name not in source.residents]
    _check_tensors(source)
    source.nodes = _sorted(source.nodes)
    _check_inputs(source)
    _check_with_onnx(model, source)
    _check_flow(source)
    return source


def _inline(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace calls of the model's own functions by what they do."""
    if not model.functions:
        return model
    from onnx import inliner

    try:
        return inliner.inline_local_functions(model)
    except Exception as error:
        raise InputError(
            f"Its functions cannot be inlined: {reason_of(error)}. Export it without functions."
        ) from None


def _stored(graph: onnx.GraphProto) -> Iterator[_Stored]:
    for dense in graph.initializer:
        yield _Stored(dense.name, "param", dense.name, dense)
    for sparse in graph.sparse_initializer:
        yield _Stored(sparse.values.name, "param", sparse.values.name, sparse)
    for node in graph.node:
        if kind_of(node) == "onnx.Constant":
            name = node.attribute[0].name if len(node.attribute) == 1 else ""
            if name not in _CONSTANTS or len(node.output) != 1:
                raise InputError(
                    f"{sentence(describe(node))} does not have just one value and one output."
                    " Export the model again."
                )
            content = _constant(node.attribute[0])
            yield _Stored(node.output[0], "constant", node.name, content)


def _constant(attribute: onnx.AttributeProto) -> Any:
    import onnx
    from onnx import numpy_helper

    value = getattr(attribute, _CONSTANTS[attribute.name])
    if attribute.name in ("value", "sparse_value"):
        return value
    if "string" in attribute.name:
        return onnx.TensorProto(data_type=STRING)
    dtype = np.float32 if "float" in attribute.name else np.int64
    return numpy_helper.from_array(np.array(value, dtype=dtype))


def _hold(source: Source, stored: _Stored, folder: Path) -> None:
    """Note a stored tensor: its type, and its value where it is small."""
    import onnx

    name, what, content = stored.tensor, str(stored), stored.content
    if name in source.residents:
        raise InputError(
            f"{what} has the name of another one (`{name}`). Give every tensor a name of its own."
        )
    is_sparse = isinstance(content, onnx.SparseTensorProto)
    parts = [content.values, content.indices] if is_sparse else [content]
    held = typed(what, parts[0].data_type, content.dims)
    num_bytes = sum(typed(what, part.data_type, part.dims).bytes for part in parts)
    source.residents[name] = Resident(stored.kind, stored.label, num_bytes)
    source.types[name] = held
    value = None if is_sparse else _value(what, content, held, folder)
    if value is not None:
        source.values[name] = value


def _value(what: str, tensor: onnx.TensorProto, held: Type, folder: Path) -> NDArray[Any] | None:
    """Check that a tensor's value is there and whole; give it if it is small."""
    import onnx
    from onnx import checker, numpy_helper

    is_small = held.elements <= KNOWN_ELEMENTS
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        raw = _fetch(what, tensor, held, folder, held.bytes if is_small else 0)
        if not is_small:
            return None
        tensor = onnx.TensorProto(data_type=tensor.data_type, dims=tensor.dims, raw_data=raw)
    try:
        checker.check_tensor(tensor)
        return numpy_helper.to_array(tensor) if is_small else None
    except (checker.ValidationError, ValueError) as error:
        raise InputError(f"{what} is broken: {reason_of(error)}. Export it again.") from None


def _fetch(what: str, tensor: onnx.TensorProto, held: Type, folder: Path, num_bytes: int) -> bytes:
    """Check that a tensor's own file is there and long enough; give its first `num_bytes`."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    inside = PurePosixPath(location)
    if not location or inside.is_absolute() or ".." in inside.parts:
        raise InputError(
            f"{what} is stored in `{location}`; expected the name of a file below the folder of"
            " the ONNX file."
        )
    try:
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", held.bytes))
        if (folder / location).exists() and not (folder / location).is_file():
            raise OSError(0, "it is no file")  # a pipe would keep whoever opens it waiting
        with open(folder / location, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(offset, 0))
            raw = file.read(num_bytes)
    except ValueError:
        raise InputError(f"{what} has an offset or length that is not a number.") from None
    except OSError as error:
        raise InputError(
            f"{what} is stored in `{folder / location}`, which cannot be read"
            f" ({error.strerror}). Put that file beside the ONNX file."
        ) from None
    if offset < 0 or length < held.bytes or offset + held.bytes > size:
        raise InputError(
            f"{what} needs {held.bytes} bytes of `{folder / location}` from byte {offset}; the"
            f" file has {size} and it is said to have {length}. Copy or export that file again."
        )
    return raw


def _check_tensors(source: Source) -> None:
    """See that every tensor is made once, and every one that is read is made."""
    makers: dict[str, str] = {}
    givers = [(value.name, f"input `{value.name}`") for value in source.inputs]
    givers += [(name, f"{held.kind} `{held.label}`") for name, held in source.residents.items()]
    givers += [(made, describe(node)) for node in source.nodes for made in node.output if made]
    for tensor, maker in givers:
        if tensor in makers:
            raise InputError(
                f"Tensor `{tensor}` is made twice, by {makers[tensor]} and by {maker}. Give every"
                " tensor a name of its own."
            )
        makers[tensor] = maker
    readers = [(read, describe(node)) for node in source.nodes for read in node.input if read]
    readers += [(tensor, "the end of the model") for tensor in source.outputs]
    for tensor, reader in readers:
        if tensor not in makers:
            raise InputError(
                f"{sentence(reader)} reads tensor `{tensor}`, which nothing makes. Export the"
                " model again."
            )


def _sorted(nodes: list[onnx.NodeProto]) -> list[onnx.NodeProto]:
    """Keep the order of `nodes` if it is a topological one; else find one."""
    makers = {made: i for i, node in enumerate(nodes) for made in node.output if made}
    before = {
        i: {makers[tensor] for tensor in node.input if tensor in makers}
        for i, node in enumerate(nodes)
    }
    if all(j < i for i, earlier in before.items() for j in earlier):
        return nodes
    try:
        return [nodes[i] for i in graphlib.TopologicalSorter(before).static_order()]
    except graphlib.CycleError as error:
        cycle = [f"`{nodes[i].name}`" for i in error.args[1]]
        if len(cycle) > 9:
            cycle = [*cycle[:4], f"({len(cycle) - 8} more)", *cycle[-4:]]
        raise InputError(
            f"Its nodes form a cycle: {' -> '.join(cycle)}. A step runs every node once; unroll"
            " loops."
        ) from None


def _check_inputs(source: Source) -> None:
    for value in source.inputs:
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
            raise InputError(
                f"Input `{value.name}` is not a tensor or has no shape. Export the model with"
                " tensors of a known number of dimensions."
            )


def _check_with_onnx(model: onnx.ModelProto, source: Source) -> None:
    """
    Have onnx check the model.

    It sees no weights, so that models of any size pass through it, and no outputs, as it refuses
    those without a shape although shapes are inferred here.
    """
    import onnx
    from onnx import checker, helper

    light = onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import)
    light.graph.name = "graph"
    light.graph.node.extend(source.nodes)
    light.graph.input.extend(source.inputs)
    light.graph.input.extend(
        helper.make_tensor_value_info(name, source.types[name].code, source.types[name].shape)
        for name in source.residents
    )
    try:
        checker.check_model(light)
    except Exception as error:
        raise InputError(f"onnx refuses it: {reason_of(error)}. Export it again.") from None


def _check_flow(source: Source) -> None:
    for node in source.nodes:
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise InputError(
                f"{sentence(describe(node))} is control flow: which of its ops run is not known"
                " before. Export the model without it (fixed shapes and lengths, loops unrolled)."
            )
