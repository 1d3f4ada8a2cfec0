"""
Looking at memory that another thread writes, compiled: nothing of it holds Python's lock.

This module owns one loop; what it is for is in `placewright.execute._boxes`.
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from placewright._compiling import kept

PATIENCE = 40
"""Looks after a flag is set. Who has set it has Python's lock, and will be in an op or wait soon;
asking for that lock before would be to sleep, and to be woken."""

_PAUSE, _YIELD = ("llvm.x86.sse2.pause", ()), ("llvm.aarch64.hint", (1,))
_RESTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "x86_64": _PAUSE,
    "AMD64": _PAUSE,
    "aarch64": _YIELD,
    "arm64": _YIELD,
}
"""What lets a processor rest for some of its ticks, by its architecture."""


@intrinsic
def _read(_, flag):
    """Read a flag that another thread may have just set, and let the processor rest a little."""

    def build(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        rest = _RESTS.get(platform.machine())
        if rest is not None:
            name, values = rest
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)] * len(values))
            function = cgutils.get_or_insert_function(builder.module, kind, name)
            builder.call(function, [ir.Constant(ir.IntType(32), value) for value in values])
        return builder.load_atomic(array.data, ordering="acquire", align=8)

    return types.int64(flag), build


@kept("boolean(int64[::1], int64)", nogil=True)
def look(flag, count):
    """Look until a flag is set and Python's lock likely free, or so many times; tell if it is."""
    for _ in range(count):
        if _read(flag) != 0:
            for _ in range(PATIENCE):
                _read(flag)
            return True
    return False
