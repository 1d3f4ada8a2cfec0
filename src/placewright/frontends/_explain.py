"""What can go wrong while a module is traced, each as one sentence that names the place."""

from __future__ import annotations

import contextlib
import logging
import os
import traceback
from collections.abc import Iterator

import torch
from torch._subclasses import fake_tensor

from placewright.errors import InputError
from placewright.frontends._recorder import Recorder


@contextlib.contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Turn what can go wrong while a module is traced into one sentence that names the place."""
    noisy = logging.getLogger("torch._subclasses.fake_tensor")  # prints tracebacks of its own
    was_disabled, noisy.disabled = noisy.disabled, True
    try:
        with _sentences(recorder):
            yield
    finally:
        noisy.disabled = was_disabled


@contextlib.contextmanager
def _sentences(recorder: Recorder) -> Iterator[None]:
    try:
        yield
    except InputError:
        raise
    except SystemExit as error:
        what = f"ended the program with `sys.exit({error.code})`"
        raise InputError(_sentence(error, what, "Take that out of the model.")) from None
    except fake_tensor.DataDependentOutputException as error:
        what, remedy = (
            f"needs the value of a tensor (`{error.func}`), and a graph is captured before there"
            " are any",
            "Replace `.item()`, `bool(tensor)` or `if tensor:` by tensor arithmetic such as"
            " `torch.where`, or pass the value in as a number.",
        )
        raise InputError(_sentence(error, what, remedy)) from None
    except fake_tensor.DynamicOutputShapeException as error:
        what, remedy = (
            f"makes a tensor whose shape depends on values (`{error.func}`)",
            "Use a form of fixed size: a mask with `torch.where`, `torch.topk`, or a padded batch.",
        )
        raise InputError(_sentence(error, what, remedy)) from None
    except fake_tensor.UnsupportedOperatorException as error:
        what, remedy = (
            f"calls `{error.func}`, which says nothing about the shape of its result",
            "Register that with `torch.library.register_fake`.",
        )
        raise InputError(_sentence(error, what, remedy)) from None
    except Exception as error:
        reason = " ".join(str(error).split()) or "no message"
        if "fake impl" in reason:
            what = (
                f"calls `{recorder.last_target}`, which says nothing about the shape of its result"
            )
            remedy = "Register that with `torch.library.register_fake`."
        elif "fake tensor" in reason.lower() or "FakeTensor" in reason or ".numpy()" in reason:
            what = f"cannot run on tensors without values ({type(error).__name__}: {reason[:200]})"
            remedy = (
                "Keep to PyTorch ops: no `.numpy()`, no data pointers, no `.tolist()`; give custom"
                " ops a `torch.library.register_fake`."
            )
        else:
            what = f"raised {type(error).__name__}: {reason[:300]}"
            remedy = (
                "Check that the module runs on these inputs, and its loss on these targets; if it"
                " does, PyTorch cannot run this op on fake tensors."
            )
        raise InputError(_sentence(error, what, remedy, recorder)) from None


def _sentence(
    error: BaseException, what: str, remedy: str, recorder: Recorder | None = None
) -> str:
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    skipped = (os.path.dirname(torch.__file__) + os.sep, os.path.join(here, "frontends") + os.sep)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not os.path.abspath(frame.filename).startswith(skipped)]
    place = f"`{own[-1].filename}`, line {own[-1].lineno}," if own else "The model"
    if not own and recorder is not None and recorder.last_target is not None:
        place = f"The model, at `{recorder.last_target}` in its {recorder.phase} pass,"
    return f"{place} {what.rstrip('.')}. {remedy}"
