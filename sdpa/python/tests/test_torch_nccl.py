"""What NCCL does otherwise than gloo, without a GPU: exchanges run in the order of a stream, waits return before transfers end, and every device has its backend."""

from collections import deque
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no distributed package", allow_module_level=True)

import sdpa  # noqa: E402
from sdpa.group import Group, _State  # noqa: E402
from sdpa.mods import joined  # noqa: E402
from sdpa.parallel import Problem, _sharding, _strategy  # noqa: E402

CUDA, CPU = torch.device("cuda", 1), torch.device("cpu")


class Backend:
    def __init__(self, name):
        self._name, self.aborted = name, 0

    def name(self):
        return self._name

    def abort(self):
        self.aborted += 1


class Processes:
    """A process group with a backend for each type of device."""

    bound_device_id = None

    def __init__(self, **backends):
        self.backends = {kind: Backend(name) for kind, name in backends.items()}

    def _get_backend(self, device):
        if device.type not in self.backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self.backends[device.type]


class Work:
    """A transfer over NCCL, which ends after so many looks, or never."""

    def __init__(self, looks=None, error=None):
        self.looks, self.error, self.waits, self.ended = looks, error, [], False

    def is_completed(self):
        if self.looks is not None:
            self.looks -= 1
            self.ended = self.looks < 0
        return self.ended

    def wait(self, *timeout):
        self.waits.append(timeout)
        if self.ended and self.error:
            raise RuntimeError(self.error)
        return True


def group(processes, deadline=None, rank=0, ranks=2):
    made = Group.__new__(Group)
    made._group, made.rank, made.ranks, made.backend = lambda: processes, rank, ranks, "nccl"
    made.deadline = deadline if deadline is None else timedelta(seconds=deadline)
    made.peers, made.state, made.unfinished = [n for n in range(ranks) if n != rank], _State(), []
    return made


@pytest.fixture(autouse=True)
def initialised(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)


def test_streams_wait_for_transfers_and_the_host_only_with_a_deadline():
    work, processes = Work(looks=3), Processes(cuda="nccl")
    made = group(processes)
    made.finish([(False, work, (1,), [torch.empty(1)])], blocking=True)
    assert work.waits == [()] and not work.ended and made.unfinished == []
    made = group(processes, 5)
    made.finish([(False, work, (1,), [torch.empty(1)])])
    # A wait of NCCL with a timeout ends the process in its watchdog.
    assert work.waits == [(), ()] and not work.ended
    made.complete()
    assert work.ended and made.unfinished == [] and processes.backends["cuda"].aborted == 0
    made.check()


def test_a_late_transfer_is_aborted_at_the_deadline():
    processes = Processes(cpu="gloo", cuda="nccl")
    made = group(processes, 0.05)
    made.finish([(False, Work(looks=1), (1,), [torch.empty(1)])])
    with pytest.raises(sdpa.ParallelError, match=r"rank 1 did not answer within 0.05 s.*was aborted") as raised:
        made.finish([(False, Work(), (1,), [torch.empty(1)])], blocking=True)
    assert raised.value.ranks == [1]
    assert (processes.backends["cuda"].aborted, processes.backends["cpu"].aborted) == (1, 0)
    with pytest.raises(sdpa.ParallelError, match="an earlier call over this process group failed"):
        made.check()


def test_a_failed_transfer_is_an_error():
    made = group(Processes(cuda="nccl"), 5)
    made.finish([(False, Work(looks=2, error="NCCL error: remote process exited"), (1, 2), [torch.empty(1)])])
    with pytest.raises(sdpa.ParallelError, match=r"one of the ranks \[1, 2\] left the group, or its connection failed \(NCCL error: remote"):
        made.complete()


def test_ranks_compare_every_call_with_a_deadline_and_otherwise_the_first():
    for deadline, exchanges in ((None, 1), (5, 3)):
        made, seen = group(Processes(cuda="nccl"), deadline), []
        made._headers = lambda numbers, reason, device, seen=seen: seen.append(numbers) or [(1, list(numbers), "")]
        for _ in range(3):
            made.agree([("seq_q", 2**63 + 1), ("dtype", 3)], CUDA, "problem")
        assert len(seen) == exchanges and len(seen[0]) == 4
    made._headers = lambda numbers, reason, device: [(1, [*numbers[:-1], 0], "")]
    with pytest.raises(sdpa.ParallelError, match="deadline differs between ranks"):
        made.agree([("seq_q", 1), ("dtype", 3)], CUDA, "other")


def test_a_failure_is_told_only_to_ranks_that_wait_for_a_header():
    for deadline, agreed, told in ((None, False, True), (None, True, False), (5, True, True)):
        made, seen = group(Processes(cuda="nccl"), deadline), []
        made._headers = lambda numbers, reason, device, seen=seen: seen.append((numbers, reason)) or []
        if agreed:
            made.state.agreed.add("problem")
        made.report(ValueError("no room"), 3, CUDA)
        assert seen == ([([1, 0, 0, 0, 0], "ValueError: no room")] if told else [])
        assert (made.state.broken is None) == told


def test_every_tensor_needs_a_backend_of_its_device():
    gloo, nccl, both = Processes(cpu="gloo", cuda="gloo"), Processes(cuda="nccl"), Processes(cpu="gloo", cuda="nccl")
    for processes, served in ((gloo, [CPU]), (nccl, [CUDA]), (both, [CPU, CUDA])):
        for device in (CPU, CUDA):
            if device in served:
                group(processes).require(device)
                continue
            with pytest.raises(sdpa.SpecError, match=f"process group: got nccl, which sends no memory of {device}, expected a group with"):
                group(processes).require(device)
    # The other ranks wait for a header over the same backend.
    assert group(gloo).device(torch.empty(1, device="meta")) == CPU and group(both).device(torch.empty(1)) == CPU
    nccl.bound_device_id = CUDA
    assert group(nccl).device(torch.empty(1)) == group(nccl).device(None) == CUDA


def transfers(step, slots, batch, dims):
    """Returns the sends and receives of an exchange: the peer, and what the receiver must know of a message."""
    size = lambda n, tokens: tokens * slots[n].heads * batch * dims(slots[n].tensor) * slots[n].dtype.itemsize  # noqa: E731
    return [[(peer, size(n, tokens)) for peer, n, _, tokens in step[way]] for way in ("sends", "receives")]


def ends(ranks):
    """Returns whether all exchanges end if each rank runs one after the other, as a stream does. Messages between two ranks keep their order."""
    at = [0] * len(ranks)
    open_ = [None] * len(ranks)
    while any(n < len(steps) for n, steps in zip(at, ranks)):
        moved = False
        for rank, steps in enumerate(ranks):
            if open_[rank] is None and at[rank] < len(steps):
                sends, receives = steps[at[rank]]
                open_[rank] = [{peer: deque(n for p, n in part if p == peer) for peer, _ in part} for part in (sends, receives)]
        for rank, now in enumerate(open_):
            for peer, sizes in (now or [{}])[0].items():
                theirs = open_[peer] and open_[peer][1].get(rank)
                while sizes and theirs:
                    assert sizes.popleft() == theirs.popleft(), "a receive of another size than its send"
                    moved = True
        for rank, now in enumerate(open_):
            if now is not None and not any(sizes for part in now for sizes in part.values()):
                open_[rank], at[rank], moved = None, at[rank] + 1, True
        if not moved:
            return False
    return True


def test_the_simulation_sees_deadlocks_and_wrong_sizes():
    assert ends([[([(1, 4)], []), ([], [(1, 8)])], [([], [(0, 4)]), ([(0, 8)], [])]])
    assert not ends([[([(1, 4)], []), ([], [(1, 8)])], [([(0, 8)], []), ([], [(0, 4)])]])
    with pytest.raises(AssertionError, match="another size"):
        ends([[([(1, 4)], [])], [([], [(0, 8)])]])


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_exchanges_end_in_the_order_of_a_stream(ranks):
    # gloo runs the exchanges of a rank side by side; those of NCCL wait for one another.
    seen = 0
    window = lambda b, h, i, j: (i - j <= 50) & (j - i <= 9)  # noqa: E731
    for mask_mod in (None, lambda b, h, i, j: i >= j, window):
        program = joined(None, None if mask_mod is None else sdpa.MaskMod(mask_mod), False, False, None, 0.0, False)[0]
        for strategy in ("all_gather", "all_gather:2", "head_exchange", "ring", *["halo"] * (mask_mod is window), *["grid:2"] * (ranks % 2 == 0)):
            for sharding in ("contiguous", "zigzag", "striped"):
                key = (program, torch.bfloat16, (2, 8, 2, 203, 203, 16, 16), ranks, _sharding(sharding)[0], _strategy(strategy), True)
                problems = [Problem(key, rank) for rank in range(ranks)]
                for which in ("forward", "backward"):
                    schedules = [problem.schedule(which) for problem in problems]
                    steps = [[transfers(step, s.slots, s.batch, s.dim) for step in s.steps if step["kind"] == "exchange"] for s in schedules]
                    assert ends(steps), f"{strategy}, {sharding}, {which}: ranks wait for one another"
                    seen += sum(len(part) for part in steps)
    assert seen > 100
