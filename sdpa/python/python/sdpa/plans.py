"""Files of cuDNN plans and native CUDA kernels, with which another process need not build them."""

from __future__ import annotations

import os
from typing import Any

import torch

from . import _native, op
from .errors import one


def _ordinal(device: Any) -> int:
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise one("device", device, "a CUDA device: the CPU executor compiles nothing")
    op.libraries()
    return torch.cuda.current_device() if device.index is None else device.index


def attach_plans(path: str | os.PathLike, device: Any = None) -> int:
    """Adds a file in which plans for `device` (the current one) are looked up before they are built: a file of `save_plans`, or of `cargo sdpa compile`, which
    needs no GPU. Returns the number of plans in the file. A damaged plan, or one of another release, is built as if it were absent.

    A plan is machine code: attach only files that you trust. An invalid file, or one for another runtime or device, raises `SpecError`.
    """
    return _native.attach_plans(_ordinal(device), os.fspath(path))


def save_plans(path: str | os.PathLike, executor: str, device: Any = None) -> int:
    """Appends the plans (`cudnn`) or kernels (`cuda`) that an executor has built on `device` in this process to a file, and creates the file if necessary.
    Returns the number of entries written. A file holds either plans or kernels."""
    return _native.save_plans(_ordinal(device), os.fspath(path), executor)
