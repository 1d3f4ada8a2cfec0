"""
Exported PyTorch programs (``.pt2`` files, from `torch.export.save`) become graphs.

`torch.export.load` unpickles whatever such a file holds, evaluates its sizes and compiles its names
as Python; each can run code. Here it gets tensors and plain values only, by PyTorch's own switch,
and files with anything else are refused, as are sizes and names that are more than that.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import re
import threading
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placewright import files
from placewright.errors import InputError
from placewright.frontends.torch import Capture, capture

if TYPE_CHECKING:
    import torch

_SWITCHES = {"TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "0"}
"""What keeps `torch.load` to tensors and plain values, whatever its caller asks for."""

_CODE = ("opaque_obj_", "custom_obj_", "aotinductor")
"""In the names of an archive's parts that are loaded without `torch.load`: objects, libraries."""

_TEXTS = {"metadata", "as_string", "as_strings", "guards_code"}
"""Where a program has text that is kept as text, or never used here."""

_CALL = re.compile(r"[(\r\n]|\\(?:[nr]|u00(?:28|0[aAdD]))")
"""What a name would need to run code: a call, or another line. In JSON within JSON, too."""

_SIZE_PARTS = (
    ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.BinOp,
    ast.UnaryOp, ast.BoolOp, ast.Compare, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
"""What a size is written with, such as ``Mul(Integer(2), Symbol('s7', positive=True))``."""

_switching = threading.Lock()


def read_exported(path: str | Path) -> Capture:
    """
    Capture the forward pass of an exported program, at the sizes of its example inputs.

    Module paths are those of the module that was exported.

    Raises
    ------
    InputError
        The file cannot be read, is no exported program, has no example inputs, or cannot be
        captured.
    """
    with warnings.catch_warnings(), _silenced("torch.export"):
        warnings.simplefilter("ignore")  # about PyTorch's own inner changes
        return capture(**build_exported(path))


def build_exported(path: str | Path) -> dict[str, Any]:
    """
    Give an exported program's module and example inputs, as the arguments of `capture`.

    Raises
    ------
    InputError
        The file cannot be read, is no exported program, or has no example inputs.
    """
    import torch

    files.digest(path, "exported program")  # for its sentences about what cannot be read
    with warnings.catch_warnings(), _silenced("torch.export") as said:
        warnings.simplefilter("ignore")  # about PyTorch's own inner changes
        try:
            program = _load_plainly(path)
            module = torch.export.unflatten(program)
        except InputError:
            raise
        except Exception as error:
            raise InputError(_explain(path, error, f"{error} {' '.join(said)}")) from None
    if program.example_inputs is None:
        raise InputError(
            f"`{path}` was saved without example inputs, so its sizes are not known. Export it"
            " again with a current PyTorch."
        )
    args, kwargs = program.example_inputs
    name = Path(path).name.removesuffix(".pt2")
    return {"module": module, "inputs": tuple(args), "kwargs": kwargs, "name": name}


def _load_plainly(path: str | Path) -> torch.export.ExportedProgram:
    """Load an exported program whose parts are tensors and plain values; refuse any other."""
    import torch

    if not all(_is_plain(json.loads(program)) for program in _programs(path)):
        raise InputError(_explain_code(path))
    with _switching:
        before = {name: os.environ.get(name) for name in _SWITCHES}
        os.environ.update(_SWITCHES)
        try:
            return torch.export.load(str(path))
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _programs(path: str | Path) -> Iterator[bytes]:
    """Give what a file says of its programs, in its form of now and of PyTorch 2.7 and before."""
    import torch

    try:
        archive = torch._C.PyTorchFileReader(str(path))
    except RuntimeError:  # not in the form of now
        pass
    else:
        names = archive.get_all_records()
        # PyTorch looks parts up without regard to case.
        if any(word in name.lower() for name in names for word in _CODE):
            raise InputError(_explain_code(path))
        yield from (archive.get_record(name) for name in names if name.startswith("models/"))
    with zipfile.ZipFile(path) as older:  # which PyTorch turns to whenever the other fails
        if "serialized_exported_program.json" in older.namelist():
            yield older.read("serialized_exported_program.json")


def _is_plain(value: Any, key: str = "") -> bool:
    """Tell whether a program's names are names, and its sizes sizes, so that none runs code."""
    if isinstance(value, dict):
        is_text = key in _TEXTS  # or a tensor of that name, which has sizes
        return all(
            (is_text or not _CALL.search(k))
            and _is_plain(v, key if is_text and k != "expr_str" else k)
            for k, v in value.items()
        )
    if isinstance(value, list):
        return all(_is_plain(each, key) for each in value)
    if not isinstance(value, str) or key in _TEXTS:
        return True
    return _is_size(value) if key == "expr_str" else not _CALL.search(value)


def _is_size(text: str) -> bool:
    """Tell whether an expression only makes sympy's own things, whose names are capitalised."""
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        if isinstance(node, ast.Call):
            if not isinstance(node.func, ast.Name) or not node.func.id[0].isupper():
                return False
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if not re.fullmatch(r"[\w.+-]*", node.value):  # sympy may evaluate it
                return False
        elif not isinstance(node, _SIZE_PARTS):
            return False
    return True


def _explain(path: str | Path, error: Exception, words: str) -> str:
    """Say why a file cannot be loaded, by what PyTorch says of it."""
    import torch

    missing = _find_missing_op(words)
    if missing is not None:
        return _explain_missing_op(path, missing)
    if "Weights only load failed" in words:
        return _explain_code(path)
    return (
        f"`{path}` is not an exported program that this PyTorch ({torch.__version__}) can read"
        f" ({type(error).__name__}). Write it with `torch.export.save`."
    )


def _explain_code(path: str | Path) -> str:
    return (
        f"`{path}` holds what can run code when it is loaded (objects, libraries, calls in place of"
        " names or sizes); expected tensors, numbers, text, and lists, tuples and dicts of them. If"
        " you trust it, name a `file.py:function` that returns"
        " `(torch.export.load(path).module(), inputs)`."
    )


def _find_missing_op(words: str) -> str | None:
    """Find the op that PyTorch says it does not know, as in ``"torch.ops.mylib.twice.default"``."""
    found = re.search(r"failed to resolve (torch\.ops\.\w+\.[\w.]+)", words)
    return None if found is None else found[1]


def _explain_missing_op(path: str | Path, op: str) -> str:
    library = op.split(".")[2]
    return (
        f"`{path}` calls `{op}`, which is not registered; expected PyTorch's own ops and those of"
        f" libraries that have been imported. Import the package that registers `torch.ops."
        f"{library}` first; on the command line, name a `file.py:function` that imports it and"
        " returns `(torch.export.load(path).module(), inputs)`."
    )


@contextlib.contextmanager
def _silenced(name: str) -> Iterator[list[str]]:
    """Keep a logger, which prints tracebacks of its own, quiet for a while; note what it says."""
    logger = logging.getLogger(name)
    said = _Said()
    before = logger.level, logger.propagate, logger.handlers[:]
    logger.handlers[:] = [said]
    logger.propagate = False
    logger.setLevel(logging.WARNING)
    try:
        yield said.words
    finally:
        level, logger.propagate, logger.handlers[:] = before
        logger.setLevel(level)


class _Said(logging.Handler):
    """Notes what a logger says."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note a message and the error that comes with it."""
        error = record.exc_info[1] if record.exc_info else None
        self.words.append(f"{record.getMessage()} {error or ''}")
