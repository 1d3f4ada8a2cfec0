"""Exported PyTorch programs (``.pt2`` files, from `torch.export.save`) become graphs."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from placewright import files
from placewright.errors import InputError
from placewright.frontends.torch import Capture, capture


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
            program = torch.export.load(str(path))
            module = torch.export.unflatten(program)
        except Exception as error:
            missing = _find_missing_op(f"{error} {' '.join(said)}")
            if missing is not None:
                raise InputError(_explain_missing_op(path, missing)) from None
            raise InputError(
                f"`{path}` is not an exported program that this PyTorch ({torch.__version__}) can"
                f" read ({type(error).__name__}). Write it with `torch.export.save`."
            ) from None
    if program.example_inputs is None:
        raise InputError(
            f"`{path}` was saved without example inputs, so its sizes are not known. Export it"
            " again with a current PyTorch."
        )
    args, kwargs = program.example_inputs
    name = Path(path).name.removesuffix(".pt2")
    return {"module": module, "inputs": tuple(args), "kwargs": kwargs, "name": name}


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
