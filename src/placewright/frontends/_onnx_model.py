"""
The words for an ONNX model that reading it, inferring its shapes and pricing it share.

This module owns what a tensor's type is and how many bytes it takes, what a checked model holds,
and what a node is called in a graph and in an error message.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from placewright.errors import InputError
from placewright.graph import MAX_TOTAL_BYTES

if TYPE_CHECKING:
    import onnx

KNOWN_ELEMENTS = 8192
"""Tensors of up to so many elements are computed at load time, if that is possible."""

_DTYPES = {
    1: ("float32", 32), 2: ("uint8", 8), 3: ("int8", 8), 4: ("uint16", 16), 5: ("int16", 16),
    6: ("int32", 32), 7: ("int64", 64), 9: ("bool", 8), 10: ("float16", 16), 11: ("float64", 64),
    12: ("uint32", 32), 13: ("uint64", 64), 14: ("complex64", 64), 15: ("complex128", 128),
    16: ("bfloat16", 16), 17: ("float8_e4m3fn", 8), 18: ("float8_e4m3fnuz", 8),
    19: ("float8_e5m2", 8), 20: ("float8_e5m2fnuz", 8), 21: ("uint4", 4), 22: ("int4", 4),
    23: ("float4_e2m1fn", 4), 24: ("float8_e8m0fnu", 8), 25: ("uint2", 2), 26: ("int2", 2),
}  # fmt: skip
"""Name and bits by the number that an ONNX file has for a data type."""

STRING = 8  # its number for strings


@dataclass(frozen=True)
class Type:
    """What a tensor is: its data type, by ONNX's number, and its shape."""

    code: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return _DTYPES[self.code][0]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.elements * _DTYPES[self.code][1] // 8)  # four-bit numbers are packed

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, eq=False)
class Resident:
    """A tensor that is there before the model runs."""

    kind: str  # "param" or "constant"
    label: str  # what to name its op
    bytes: int  # of values and indices, if it is sparse


@dataclass(eq=False)
class Source:
    """A checked model: nodes in topological order, weights and constants taken out."""

    nodes: list[onnx.NodeProto]
    inputs: list[onnx.ValueInfoProto]  # those that must be given
    outputs: list[str]
    declared: dict[str, onnx.TypeProto]  # by tensor, where the file says
    opsets: dict[str, int]  # version by domain
    residents: dict[str, Resident] = field(default_factory=dict)  # by tensor
    types: dict[str, Type] = field(default_factory=dict)  # by tensor
    values: dict[str, NDArray[Any]] = field(default_factory=dict)  # by tensor, small ones


def typed(what: str, code: int, shape: Iterable[int]) -> Type:
    """Make a type, or refuse what cannot be one."""
    if code == STRING:
        raise InputError(
            f"{what} holds strings, which no device computes with. Cut them off the model."
        )
    if code not in _DTYPES:
        raise InputError(
            f"{what} has data type number {code}, which is not known. Export the model again with"
            " another data type."
        )
    made = Type(code, tuple(shape))
    if min(made.shape, default=0) < 0:
        raise InputError(f"{what} has the shape {list(made.shape)}; expected no negative size.")
    if made.bytes >= MAX_TOTAL_BYTES:
        raise InputError(
            f"{what} is {made}, which is more than {MAX_TOTAL_BYTES:.3g} bytes. Check `dims`."
        )
    return made


def domain_of(name: str) -> str:
    """Spell a domain in one way: the standard has two names, of which "" is one."""
    return "" if name == "ai.onnx" else name


def kind_of(node: onnx.NodeProto) -> str:
    """Name a node's op as a graph does: ``onnx.Conv``."""
    return f"{domain_of(node.domain) or 'onnx'}.{node.op_type}"


def standard_name(node: onnx.NodeProto) -> str:
    """Name a node's op if it is one of the standard's; "" otherwise."""
    return "" if domain_of(node.domain) else node.op_type


def describe(node: onnx.NodeProto) -> str:
    """Name a node in the middle of an error message: ``node `fc` (Gemm)``."""
    return f"node `{node.name}` ({kind_of(node).removeprefix('onnx.')})"


def sentence(text: str) -> str:
    """Begin a sentence with `text`."""
    return text[:1].upper() + text[1:]


def reason_of(error: Exception) -> str:
    """Give onnx's message, which may have several lines, as the end of a sentence of ours."""
    text = re.sub(r"\[\w+Error\] ", "", str(error))
    return " ".join(re.sub(r"\.?\s*==> Context: ", "; ", text).split())[:300].rstrip(".")
