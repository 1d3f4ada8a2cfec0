"""Exported PyTorch programs (``.pt2`` files, from `torch.export.save`) become graphs."""

from __future__ import annotations

import contextlib
import logging
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
    with warnings.catch_warnings(), _silenced("torch.export"):
        warnings.simplefilter("ignore")  # about PyTorch's own inner changes
        try:
            program = torch.export.load(str(path))
            module = torch.export.unflatten(program)
        except Exception as error:
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


@contextlib.contextmanager
def _silenced(name: str) -> Iterator[None]:
    """Keep a logger, which prints tracebacks of its own, quiet for a while."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)
