"""Files of what was made for a GPU, so that another process makes none of it again: plans of cuDNN, and native CUDA kernels."""

from __future__ import annotations

import os
from typing import Any

import torch

from . import _native, op
from .errors import one


def _ordinal(device: Any) -> int:
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise one("device", device, "a CUDA device: the CPU executor makes nothing that is worth keeping")
    op.libraries()
    return torch.cuda.current_device() if device.index is None else device.index


def attach_plans(path: str | os.PathLike, device: Any = None) -> int:
    """Looks for plans in a file from now on, before they are made on `device` (the current one): of `save_plans`, or of `cargo sdpa compile`, which needs no
    GPU. Says how many the file has. One that is damaged or of another release is made as if it were not there.

    A plan is machine code: attach only files that you trust. What is wrong with the file, or that it is for another runtime or device, is a `SpecError`.
    """
    return _native.attach_plans(_ordinal(device), os.fspath(path))


def save_plans(path: str | os.PathLike, executor: str, device: Any = None) -> int:
    """Adds what an executor (`cudnn` its plans, `cuda` its kernels) has made on `device` in this process to a file, which is made where there is none. Says how
    many were written. A file has what one of the two made."""
    return _native.save_plans(_ordinal(device), os.fspath(path), executor)
