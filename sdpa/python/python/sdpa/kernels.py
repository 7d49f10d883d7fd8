"""The kernel cache on disk: a process loads kernels that an earlier process compiled for a GPU."""

from __future__ import annotations

import os
from typing import Any

from . import _native
from .errors import one


def set_kernel_cache(on: bool = True, folder: str | os.PathLike | None = None, limit_bytes: int | None = None) -> None:
    """Turns the kernel cache on disk on or off, for kernels that this process compiles from now on, on every GPU. The cache is on unless the variable
    `SDPA_CACHE` is `off`; this function takes precedence over the variable.

    `folder` is an absolute path. The default is `kernels` in `SDPA_CACHE_DIR`, or in `sdpa` in `XDG_CACHE_HOME` or `~/.cache`. `limit_bytes` is the maximum
    total size of its files (256 MiB); the least recently used are deleted first. An invalid argument raises `SpecError`. A fault of the folder never fails a
    call: kernels are compiled then, and `kernel_cache()["refused"]` has the reason.

        sdpa.set_kernel_cache(False)
        sdpa.set_kernel_cache(folder="/scratch/me/kernels", limit_bytes=64 << 20)
    """
    if not isinstance(on, bool):
        raise one("on", repr(on), "True or False")
    if not on and (folder is not None or limit_bytes is not None):
        raise one("on", on, "True with a folder or a limit")
    if limit_bytes is not None and (isinstance(limit_bytes, bool) or not isinstance(limit_bytes, int) or not 0 <= limit_bytes < 1 << 63):
        raise one("limit_bytes", repr(limit_bytes), "a number of bytes, an integer from 0 to 2^63 - 1")
    _native.set_kernel_cache(on, None if folder is None else os.fspath(folder), limit_bytes)


def kernel_cache() -> dict[str, Any] | None:
    """Returns the state of the kernel cache on disk: `folder`, `kernels`, `bytes`, `limit_bytes`, and `refused`, the reason why the folder is not used, or
    None. Returns None if the cache is off."""
    facts = _native.kernel_cache()
    return None if facts is None else dict(zip(("folder", "kernels", "bytes", "limit_bytes", "refused"), facts))


def clear_kernel_cache() -> int:
    """Deletes every kernel of the cache on disk and returns their number. Kernels that this process has loaded stay usable. Raises `EnvironmentError` if a file
    cannot be deleted."""
    return _native.clear_kernel_cache()
