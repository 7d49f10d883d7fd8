"""A rank's connection with the other ranks of a process group: exchanges with a deadline, and the comparison of problems."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .errors import ParallelError, one

# The length of a failed rank's reason in a header, in bytes.
_REASON = 504
# Broken groups and problems that ranks have compared, by process group: contexts may be made anew for each step.
_STATES: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class _State:
    def __init__(self) -> None:
        self.broken: str | None = None
        self.agreed: set = set()


def process_group(given: Any) -> Any:
    """Returns the process group of a mesh, of a group, or the default one."""
    rule = "a ProcessGroup, a DeviceMesh with one dimension, or None for the default group"
    if not dist.is_available() or not dist.is_initialized():
        raise one("process group", "none", "an initialised one: call torch.distributed.init_process_group first")
    if given is None:
        return dist.group.WORLD
    if isinstance(given, dist.ProcessGroup):
        return given
    if hasattr(dist, "DeviceMesh") and isinstance(given, dist.DeviceMesh):
        if given.ndim != 1:
            names = f" (mesh[{given.mesh_dim_names[0]!r}] is one of this mesh)" if given.mesh_dim_names else ""
            raise one("mesh", f"{given.ndim} dimensions", f"one dimension{names}")
        return given.get_group()
    if given is dist.GroupMember.NON_GROUP_MEMBER:
        raise one("process group", "one without this rank", "a group that this rank is in")
    raise one("mesh_or_group", type(given).__name__, rule)


class Group:
    """A process group, with this process's rank in it."""

    def __init__(self, given: Any, deadline: float | None):
        group = process_group(given)
        # A strong reference would keep the group's threads running after `destroy_process_group`.
        self._group = weakref.ref(group)
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise one("process group", "one without this rank", "a group that this rank is in")
        self.deadline = None if deadline is None else timedelta(seconds=deadline)
        self.backend = str(dist.get_backend(group))
        self.peers = [rank for rank in range(self.ranks) if rank != self.rank]
        self.state = _STATES.setdefault(group, _State())

    @property
    def group(self) -> Any:
        """The process group."""
        group = self._group()
        if group is None or not dist.is_initialized():
            raise one("process group", "one that was destroyed", "a new context for a group that is there")
        return group

    def device(self, tensor: Any) -> torch.device:
        """Returns the device of headers, for a call with this tensor."""
        if isinstance(tensor, torch.Tensor) and tensor.device.type in ("cpu", "cuda"):
            return tensor.device
        return torch.device("cuda", torch.cuda.current_device()) if "nccl" in self.backend and "gloo" not in self.backend else torch.device("cpu")

    def check(self) -> None:
        """Raises an error if an earlier exchange failed: ranks may be at different steps."""
        if self.state.broken is not None:
            raise ParallelError(f"an earlier call over this process group failed ({self.state.broken}); make a new group")

    def fail(self, error: BaseException) -> None:
        """Marks the group as unusable."""
        if self.state.broken is None:
            self.state.broken = f"{type(error).__name__}: {error}"

    def start(self, sends: list, receives: list) -> list:
        """Starts transfers of contiguous tensors: (peer, tensor). Returns works with their peers and tensors, which must be kept until `finish`."""
        transfers = [(dist.isend, peer, tensor) for peer, tensor in sends] + [(dist.irecv, peer, tensor) for peer, tensor in receives]
        if not transfers:
            return []
        # Bytes: not every backend has every type.
        group = self.group
        operations = [dist.P2POp(f, tensor.view(-1).view(torch.uint8), dist.get_global_rank(group, peer), group) for f, peer, tensor in transfers]
        try:
            works = dist.batch_isend_irecv(operations)
        except RuntimeError as error:
            self._raise(error, sorted({peer for _, peer, _ in transfers}))
        if len(works) == len(transfers):
            # A lost peer is found by what it does not send.
            found = [(f is dist.isend, work, (peer,), tensor) for work, (f, peer, tensor) in zip(works, transfers)]
            return sorted(found, key=lambda work: work[0])
        peers = tuple(sorted({peer for _, peer, _ in transfers}))
        return [(False, work, peers, tensor) for work in works for tensor in [[tensor for _, _, tensor in transfers]]]

    def finish(self, works: list, blocking: bool = False) -> None:
        """Waits for transfers: on the CPU until the deadline; on a GPU the current stream waits, and the backend's own timeout applies."""
        for _, work, peers, tensor in works:
            on_host = blocking or (isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu")
            try:
                if on_host and self.deadline is not None:
                    done = work.wait(self.deadline)
                else:
                    done = work.wait()
            except RuntimeError as error:
                self._raise(error, peers)
            if done is False:
                self._raise(RuntimeError("the transfer was not completed"), peers)

    def _raise(self, error: RuntimeError, peers: Any) -> NoReturn:
        peers = list(peers)
        who = f"rank {peers[0]}" if len(peers) == 1 else f"one of the ranks {peers}"
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        within = "in time" if self.deadline is None else f"within {self.deadline.total_seconds():g} s"
        what = f"did not answer {within}; it may be stopped, or wait for another exchange" if late else "left the group, or its connection failed"
        failed = ParallelError(f"{who} {what} ({error})", ranks=peers)
        self.fail(failed)
        raise failed from error

    def agree(self, digest: list, device: torch.device, key: Any) -> None:
        """Compares the digest of a call with those of all ranks: in every call over host memory, and in the first one of each problem over GPUs, where the
        comparison waits for the GPU. Raises an error on every rank if they differ, or if a rank could not prepare the call."""
        if self.ranks == 1 or (device.type != "cpu" and key in self.state.agreed):
            return
        others = self._headers([0, *[n - 2**64 if n >= 2**63 else n for _, n in digest]], "", device)
        failed = [(peer, reason) for peer, numbers, reason in others if numbers[0]]
        if failed:
            text = "; ".join(f"rank {peer} failed: {reason}" for peer, reason in failed)
            raise ParallelError(text, ranks=[peer for peer, _ in failed])
        for n, (field, value) in enumerate(digest):
            unlike = [peer for peer, numbers, _ in others if (numbers[1 + n] - value) % 2**64]
            if unlike:
                rule = "pass equal arguments on every rank"
                if field in ("seq_q", "seq_kv"):
                    rule += "; if shards differ in length, pass seq= to context_parallel, or a block mask of the whole problem"
                raise ParallelError(f"{field} differs between ranks: ranks {unlike} have another value than rank {self.rank}; {rule}", field, unlike)
        self.state.agreed.add(key)

    def report(self, error: BaseException, fields: int, device: torch.device) -> None:
        """Sends this rank's failure to the other ranks, which wait for its header. The group stays usable."""
        if self.ranks == 1:
            return
        self._headers([1] + [0] * fields, f"{type(error).__name__}: {error}", device)

    def _headers(self, numbers: list, reason: str, device: torch.device) -> list:
        """Exchanges headers with all ranks. Returns those of the others: the peer, its numbers, and its reason."""
        text = list(reason.encode()[:_REASON].ljust(_REASON, b"\0"))
        packed = [int.from_bytes(bytes(text[n : n + 8]), "little", signed=True) for n in range(0, _REASON, 8)]
        own = torch.tensor([*numbers, *packed], dtype=torch.int64).to(device)
        received = [(peer, torch.zeros_like(own)) for peer in self.peers]
        self.finish(self.start([(peer, own) for peer in self.peers], received), blocking=True)
        found = []
        for peer, header in received:
            values = header.tolist()
            read = b"".join(n.to_bytes(8, "little", signed=True) for n in values[len(numbers) :])
            found.append((peer, values[: len(numbers)], read.rstrip(b"\0").decode(errors="replace")))
        return found
