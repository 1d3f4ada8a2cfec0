"""
How much work a node of an ONNX model is: its arithmetic and the bytes it must move.

This module owns which ops are priced, and which inputs a node reads as data when it runs. A
multiplication and an addition count as two; ops without a formula count one for each element of
what is more, all they read or all they make; those that only move data count none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from placewright.frontends._onnx_model import Source, Type, standard_name

if TYPE_CHECKING:
    import onnx

_PER_ELEMENT = {
    "Abs", "Acos", "Acosh", "Add", "AffineGrid", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan",
    "Atanh", "BatchNormalization", "Bernoulli", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
    "BitwiseXor", "Ceil", "Celu", "Clip", "Col2Im", "Cos", "Cosh", "CumProd", "CumSum",
    "DequantizeLinear", "Div", "Dropout", "DynamicQuantizeLinear", "Elu", "Equal", "Erf", "Exp",
    "Floor", "Gelu", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "Greater",
    "GreaterOrEqual", "GridSample", "GroupNormalization", "HardSigmoid", "HardSwish", "Hardmax",
    "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LayerNormalization", "LeakyRelu", "Less",
    "LessOrEqual", "Log", "LogSoftmax", "LpNormalization", "Max", "Mean",
    "MeanVarianceNormalization", "Min", "Mish", "Mod", "Mul", "Multinomial", "Neg",
    "NegativeLogLikelihoodLoss", "Not", "Or", "PRelu", "Pow", "QuantizeLinear", "RMSNormalization",
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Reciprocal",
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Resize", "RotaryEmbedding",
    "Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softmax",
    "SoftmaxCrossEntropyLoss", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "SwiGLU", "Swish",
    "Tan", "Tanh", "ThresholdedRelu", "TopK", "Upsample", "Xor",
}  # fmt: skip
"""Counts one for each element of what is more, all it reads or all it makes."""

_MOVES = {
    "BitCast", "Cast", "CastLike", "CenterCropPad", "Compress", "Concat", "ConstantOfShape",
    "DepthToSpace", "Expand", "EyeLike", "Flatten", "Gather", "GatherElements", "GatherND",
    "Identity", "MaxUnpool", "NonZero", "OneHot", "Pad", "Range", "Reshape", "ReverseSequence",
    "Scatter", "ScatterElements", "ScatterND", "Shape", "Size", "Slice", "SpaceToDepth", "Split",
    "Squeeze", "TensorScatter", "Tile", "Transpose", "Trilu", "Unsqueeze", "Where",
}  # fmt: skip
"""Computes nothing."""

_GATHERS = {"Compress", "Gather", "GatherElements", "GatherND", "Slice"}
"""Reads as much of its first input as it gives back, whatever that input's size."""

_CREATORS = {"EyeLike", "RandomNormalLike", "RandomUniformLike"}
"""Takes nothing but the shape of what it is given."""

_INTEGER_PRODUCTS = {"ConvInteger", "MatMulInteger", "QLinearConv", "QLinearMatMul"}
"""Computes in the type of its first input, although scales are floats and sums are wider."""

_SETTINGS = {
    "AffineGrid": {1}, "CenterCropPad": {1}, "Col2Im": {1, 2}, "ConstantOfShape": {0},
    "Expand": {1}, "MaxUnpool": {2}, "Pad": {1, 3}, "ReduceL1": {1}, "ReduceL2": {1},
    "ReduceLogSum": {1}, "ReduceLogSumExp": {1}, "ReduceMax": {1}, "ReduceMean": {1},
    "ReduceMin": {1}, "ReduceProd": {1}, "ReduceSum": {1}, "ReduceSumSquare": {1},
    "Resize": {1, 2, 3}, "Slice": {1, 2, 3, 4}, "Split": {1}, "Tile": {1}, "Upsample": {1},
}  # fmt: skip
"""Inputs that tell a node its axes or sizes, by position; those of one element need no entry."""


@dataclass(frozen=True, eq=False)
class Call:
    """A node and the types of what it reads and makes, by position; None where left out."""

    node: onnx.NodeProto
    inputs: list[Type | None]
    outputs: list[Type | None]
    data: dict[str, Type]  # by tensor: what it reads when it runs

    def read(self, k: int) -> Type:
        """Give the type of input `k`, which onnx has checked to be there."""
        found = self.inputs[k]
        assert found is not None
        return found

    @property
    def made(self) -> list[Type]:
        """What it makes, without outputs that are left out."""
        return [made for made in self.outputs if made is not None]

    def attribute(self, name: str, default: Any) -> Any:
        """Give an attribute's value, or `default` if it has none."""
        from onnx import helper

        found = (a for a in self.node.attribute if a.name == name)
        return next((helper.get_attribute_value(attribute) for attribute in found), default)


def call_of(node: onnx.NodeProto, source: Source) -> Call:
    """Gather what a node's price depends on. Settings that are known are no data."""
    types, values = source.types, source.values
    settings = _SETTINGS.get(standard_name(node), set())
    data = {
        tensor: types[tensor]
        for k, tensor in enumerate(node.input)
        if tensor and not (tensor in values and (k in settings or types[tensor].elements <= 1))
    }
    inputs = [types.get(tensor) for tensor in node.input]
    return Call(node, inputs, [types.get(tensor) for tensor in node.output], data)


def _convolution(weight: int) -> Callable[[Call], int]:
    """Make the formula of a convolution whose weight is input `weight`."""
    return lambda call: 2 * call.made[0].elements * math.prod(call.read(weight).shape[1:])


def _transposed_convolution(call: Call) -> int:
    return 2 * call.read(0).elements * math.prod(call.read(1).shape[1:])


def _gemm(call: Call) -> int:
    return 2 * call.made[0].elements * call.read(0).shape[0 if call.attribute("transA", 0) else 1]


def _matmul(call: Call) -> int:
    return 2 * call.made[0].elements * call.read(0).shape[-1]


def _recurrent(call: Call) -> int:
    steps = math.prod(call.read(0).shape[:-1])  # of time and batch, in either layout
    return 2 * steps * (call.read(1).elements + call.read(2).elements)


def _attention(call: Call) -> int:
    kept = [*call.inputs[1:2], *call.inputs[4:5]]  # keys, and those of the past
    keys = sum(held.shape[-2] for held in kept if held is not None)
    return 2 * keys * (call.read(0).elements + call.made[0].elements)


def _pool(call: Call) -> int:
    window: Sequence[int] = call.attribute("kernel_shape", ())
    return call.made[0].elements * math.prod(window)


def _einsum(call: Call) -> int:
    """Count a multiplication or an addition per operand and point of the whole index space."""
    terms = call.attribute("equation", b"").decode().replace(" ", "").partition("->")[0].split(",")
    sizes: dict[str, int] = {}
    for k, term in enumerate(terms):
        shape = call.read(k).shape
        left, _, right = term.partition("...")
        hidden = [f".{axis}" for axis in range(len(shape) - len(left) - len(right), 0, -1)]
        for index, size in zip([*left, *hidden, *right], shape, strict=True):
            sizes[index] = size if sizes.get(index, 1) == 1 else sizes[index]  # 1 is broadcast
    return len(terms) * math.prod(sizes.values())


_FORMULAS: dict[str, Callable[[Call], int]] = {
    "Attention": _attention,
    "AveragePool": _pool,
    "CausalConvWithState": _convolution(1),
    "Conv": _convolution(1),
    "ConvInteger": _convolution(1),
    "ConvTranspose": _transposed_convolution,
    "DeformConv": _convolution(1),
    "Einsum": _einsum,
    "GRU": _recurrent,
    "Gemm": _gemm,
    "LSTM": _recurrent,
    "LpPool": _pool,
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "MaxPool": _pool,
    "QLinearConv": _convolution(3),
    "QLinearMatMul": _matmul,
    "RNN": _recurrent,
}


PRICED = {f"onnx.{name}" for name in (*_FORMULAS, *_PER_ELEMENT, *_MOVES)}
"""Kinds of ops whose arithmetic is known."""


def count_flops(call: Call) -> int:
    """Count a node's operations, a multiplication and an addition as two; 0 if unknown."""
    name = standard_name(call.node)
    if name in _FORMULAS:
        return _FORMULAS[name](call)
    if name in _PER_ELEMENT:
        read = sum(call.data[tensor].elements for tensor in call.node.input if tensor in call.data)
        return max(read, sum(made.elements for made in call.made))
    return 0


def count_bytes(call: Call) -> int:
    """Count the bytes that a node moves at least."""
    made = sum(made.bytes for made in call.made)
    first = call.node.input[0] if call.node.input else ""
    if standard_name(call.node) in _CREATORS:
        return made
    if standard_name(call.node) in _GATHERS:
        return 2 * made + sum(read.bytes for name, read in call.data.items() if name != first)
    return made + sum(read.bytes for read in call.data.values())


def dtype_of(call: Call) -> str:
    """Tell the data type that a node computes in."""
    if standard_name(call.node) in _INTEGER_PRODUCTS:
        return call.read(0).dtype
    dtypes = [kind.dtype for kind in (*call.made, *call.data.values())]
    return next((dtype for dtype in dtypes if "float" in dtype), (dtypes or ["float32"])[0])
