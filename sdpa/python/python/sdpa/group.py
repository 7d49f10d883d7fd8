"""A rank's connection with the other ranks of a process group: exchanges with a deadline, and the comparison of problems."""

from __future__ import annotations

import time
import weakref
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from .errors import ParallelError, one

# The length of a failed rank's reason in a header, in bytes.
_REASON = 504
# Seconds between two looks at a transfer on a GPU.
_POLL = 1e-4
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
        # Transfers on GPUs that a stream waits for, and the host does not yet.
        self.unfinished: list = []

    @property
    def group(self) -> Any:
        """The process group."""
        group = self._group()
        if group is None or not dist.is_initialized():
            raise one("process group", "one that was destroyed", "a new context for a group that is there")
        return group

    def backend_of(self, device: torch.device) -> str | None:
        """Returns the name of the backend that exchanges memory of a device, or None."""
        try:
            return self.group._get_backend(device).name()
        except RuntimeError:
            return None

    def serves(self, device: torch.device) -> bool:
        """Returns whether the group exchanges memory of a device. PyTorch registers gloo for GPUs too, but it sends host memory only."""
        backend = self.backend_of(device)
        return backend is not None and (device.type == "cpu" or backend != "gloo")

    def require(self, device: torch.device) -> None:
        """Raises an error if the group does not exchange memory of a device."""
        if not self.serves(device):
            rule = "a group with gloo" if device.type == "cpu" else "a group with NCCL"
            raise one("process group", f"{self.backend}, which sends no memory of {device}", f'{rule} for these tensors, or "cpu:gloo,cuda:nccl" for both')

    def device(self, tensor: Any) -> torch.device:
        """Returns the device of headers, for a call with this tensor."""
        if isinstance(tensor, torch.Tensor) and tensor.device.type in ("cpu", "cuda") and self.serves(tensor.device):
            return tensor.device
        cpu = torch.device("cpu")
        if self.serves(cpu):
            return cpu
        return self.group.bound_device_id or torch.device("cuda", torch.cuda.current_device())

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
        """Waits for transfers: on the CPU until the deadline; on a GPU the current stream waits. `blocking` waits on the host for transfers on a GPU too, if
        there is a deadline."""
        for _, work, peers, tensor in works:
            on_host = isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu"
            try:
                done = work.wait(self.deadline) if on_host and self.deadline is not None else work.wait()
            except RuntimeError as error:
                self._raise(error, peers)
            if done is False:
                self._raise(RuntimeError("the transfer was not completed"), peers)
            if not on_host and self.deadline is not None:
                self.unfinished.append((work, peers))
        if blocking:
            self.complete()

    def complete(self) -> None:
        """Waits on the host until the deadline for transfers on a GPU. The streams of a GPU wait for them without end: NCCL returns when it has submitted a
        transfer, and after its timeout the watchdog of PyTorch ends the process. So a transfer that is late is aborted here."""
        works, self.unfinished = self.unfinished, []
        if not works:
            return
        until = time.monotonic() + self.deadline.total_seconds()
        for work, peers in works:
            while not work.is_completed():
                if time.monotonic() > until:
                    self._abort()
                    self._raise(RuntimeError("a transfer on the GPU timed out and was aborted"), peers)
                time.sleep(_POLL)
            try:
                work.wait()  # raises the error of a transfer that failed
            except RuntimeError as error:
                self._raise(error, peers)

    def _abort(self) -> None:
        """Ends the transfers of this rank, so that the GPU can be used again."""
        try:
            self.group._get_backend(torch.device("cuda")).abort()
        except RuntimeError as error:  # the caller raises the reason
            self.fail(error)

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
        """Compares the digest of a call with those of all ranks: in every call over host memory or with a deadline, and otherwise in the first one of each
        problem, because the comparison waits for the GPU. Raises an error on every rank if they differ, or if a rank could not prepare the call."""
        if self.ranks == 1 or (not self._in_every_call(device) and key in self.state.agreed):
            return
        # Ranks with and without a deadline would compare different calls.
        digest = [*digest, ("deadline", int(self.deadline is not None))]
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

    def _in_every_call(self, device: torch.device) -> bool:
        """Returns whether ranks compare every call."""
        return device.type == "cpu" or self.deadline is not None

    def report(self, error: BaseException, fields: int, device: torch.device) -> None:
        """Sends this rank's failure to the other ranks, which wait for its header. The group stays usable.

        Ranks that do not compare every call may have begun to exchange operands, and would read the header as such. The group is then of no further use."""
        if self.ranks == 1:
            return
        if not self._in_every_call(device) and self.state.agreed:
            self.fail(error)
            return
        self._headers([1] + [0] * (fields + 1), f"{type(error).__name__}: {error}", device)

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
