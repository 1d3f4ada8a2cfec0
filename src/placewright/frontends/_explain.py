"""What can go wrong while a module is traced, each as one sentence that names the place."""

from __future__ import annotations

import contextlib
import logging
import os
import sysconfig
import traceback
from collections.abc import Iterator

import torch
from torch._subclasses import fake_tensor

from placewright.errors import InputError
from placewright.frontends._known_values import RandomChoiceError
from placewright.frontends._recorder import Recorder

_EXPERTS = os.path.join("transformers", "integrations", "moe.py")
"""Where Hugging Face's mixtures of experts choose how their experts are computed."""


@contextlib.contextmanager
def explained(recorder: Recorder) -> Iterator[None]:
    """Turn what can go wrong while a module is traced into one sentence that names the place."""
    noisy = logging.getLogger("torch._subclasses.fake_tensor")  # prints tracebacks of its own
    was_disabled, noisy.disabled = noisy.disabled, True
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        what, remedy = _describe(error, recorder)
        remedy = _advise_experts(error) or remedy
        place = _find_place(error, recorder)
        raise InputError(f"{place} {what.rstrip('.')}. {remedy}") from None
    finally:
        noisy.disabled = was_disabled


def _describe(error: BaseException, recorder: Recorder) -> tuple[str, str]:
    """Say what has happened, and what to do about it."""
    register = "Register that with `torch.library.register_fake`."
    if isinstance(error, SystemExit):
        return f"ended the program with `sys.exit({error.code})`", "Take that out of the model."
    if isinstance(error, RandomChoiceError):
        return (
            "draws a random number to decide what it computes, such as which layers are left out,"
            " and a plan computes the same in each step",
            "Set that probability (`layerdrop`) to zero.",
        )
    if isinstance(error, fake_tensor.DataDependentOutputException):
        return (
            f"needs the value of a tensor (`{error.func}`), and a graph is captured before there"
            " are any",
            "Replace `.item()`, `bool(tensor)` or `if tensor:` by tensor arithmetic such as"
            " `torch.where`, or pass the value in as a number.",
        )
    if isinstance(error, fake_tensor.DynamicOutputShapeException):
        return (
            f"makes a tensor whose shape depends on values (`{error.func}`)",
            "Use a form of fixed size: a mask with `torch.where`, `torch.topk`, or a padded batch.",
        )
    if isinstance(error, fake_tensor.UnsupportedOperatorException):
        return f"calls `{error.func}`, which says nothing about the shape of its result", register
    reason = " ".join(str(error).split()) or "no message"
    if "use_reentrant=True" in reason:
        return (
            "computes a part of the forward pass again in the backward pass, in a way that cannot"
            " be captured (`torch.utils.checkpoint` with `use_reentrant=True`)",
            "Pass `use_reentrant=False`; to Hugging Face's models as"
            ' `gradient_checkpointing_kwargs={"use_reentrant": False}`.',
        )
    if "fake impl" in reason:
        return (
            f"calls `{recorder.last_target}`, which says nothing about the shape of its result",
            register,
        )
    if "SparseTensorImpl" in reason or "SparseCsrTensorImpl" in reason:
        return (
            "uses a sparse tensor, and only dense ones can be captured",
            "Leave it dense, or make it sparse outside of the module.",
        )
    if "NestedTensorImpl" in reason or "NestedIntNode" in reason:
        return (
            "uses a nested tensor, and only dense ones can be captured",
            "Pad it with `.to_padded_tensor(0.0)`; make `nn.TransformerEncoder` with"
            " `enable_nested_tensor=False`.",
        )
    if "data is not allocated yet" in reason:
        return (
            "needs the values of a tensor, and a graph is captured before there are any",
            "Pass them in as numbers: a list of ints in place of a tensor of indices.",
        )
    if "fake tensor" in reason.lower() or "FakeTensor" in reason or ".numpy()" in reason:
        return (
            f"cannot run on tensors without values ({type(error).__name__}: {reason[:200]})",
            "Keep to PyTorch ops: no `.numpy()`, no data pointers, no `.tolist()`; give custom"
            " ops a `torch.library.register_fake`.",
        )
    return (
        f"raised {type(error).__name__}: {reason[:300]}",
        "Check that the module runs on these inputs, and its loss on these targets; if it does,"
        " PyTorch cannot run this op on fake tensors.",
    )


def _advise_experts(error: BaseException) -> str | None:
    """Say which form of Hugging Face's experts can be captured, if another one could not."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_filename.endswith(_EXPERTS):
            config = getattr(frame.f_locals.get("self"), "config", None)
            if getattr(config, "_experts_implementation", None) == "batched_mm":
                return None
            return (
                "Choose experts with shapes that do not depend on values:"
                ' `model.set_experts_implementation("batched_mm")`, or'
                ' `from_pretrained(..., experts_implementation="batched_mm")`.'
            )
    return None


def _find_place(error: BaseException, recorder: Recorder) -> str:
    """Name the module and the line of the model, or the op, where something has gone wrong."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_own(frame.filename)]
    module = _name_module(error, recorder)
    if own:
        line = f"`{own[-1].filename}`, line {own[-1].lineno},"
        return f"In {module}, {line}" if module else line
    at = ""
    if recorder.last_target is not None:
        at = f", at `{recorder.last_target}` in its {recorder.phase} pass,"
    return f"{module[0].upper()}{module[1:]}{at}" if module else f"The model{at}"


def _is_own(file: str) -> bool:
    """Tell the user's code from PyTorch's, Python's and ours."""
    ours = os.path.dirname(os.path.abspath(__file__))
    skipped = tuple(folder + os.sep for folder in (os.path.dirname(torch.__file__), ours))
    file = os.path.abspath(file)
    is_python = file.startswith(sysconfig.get_path("stdlib") + os.sep)
    is_installed = f"{os.sep}site-packages{os.sep}" in file
    return not file.startswith(skipped) and (is_installed or not is_python)


def _name_module(error: BaseException, recorder: Recorder) -> str:
    """Name the submodule that was running, as in ``"`encoder.0.fc` (Linear)"``; "" if none was."""
    path = recorder.modules[-1]
    if recorder.phase != "forward" or not path:
        return ""
    running = [
        frame.f_locals["self"]
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code is torch.nn.Module._call_impl.__code__
    ]
    return f"`{path}` ({type(running[-1]).__name__})" if running else ""
