"""interleave.py OLD NEW OUT [SECONDS]: times of the native CUDA kernels of two builds of `device`, call by call in turn.

Each build is a process of its own, on the same GPU. OUT gets a JSON line for each problem, with the median of both times in ms, their ratio NEW ÷ OLD, and
the median and quartiles of the ratios of neighbouring measurements. No problem begins after SECONDS (default 120).
"""
import json
import statistics
import subprocess
import sys
import time

NAMES = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "dim_qk", "dim_v")
ROUNDS = 21
# Long enough that the time between two CUDA events is not that of a launch.
MEASURED_MS = 12


def problem(dims=(128, 128), score_mod=(), mask=(), dtype="bf16", shape=(4, 32, 32, 4096, 4096), **more):
    return dict(shape=dict(zip(NAMES, (*shape, *dims))), dtype=dtype, layout="bhsd", score_mod=list(score_mod), mask=list(mask), **more)


PROBLEMS = [
    problem(),
    problem(mask=["causal"]),
    problem((64, 64)),
    problem((64, 64), mask=["causal"]),
    problem((256, 256), shape=(1, 16, 16, 8192, 8192)),
    problem((192, 128), mask=["causal"]),
    problem(score_mod=["softcap:30"], mask=["causal"]),
    problem(score_mod=["alibi"], mask=["causal"]),
    problem(mask=["window:256,0"]),
    problem(mask=["causal"], dtype="f16"),
    problem(mask=["causal"], shape=(4, 32, 8, 1024, 1024)),
    problem(mask=["causal"], dropout=0.1),
    problem(score_mod=["softcap:30"], mask=["causal"], dropout=0.1),
    problem(mask=["(q - k) % 3 == 0 & k <= q"]),
    problem((64, 64), score_mod=["softcap:30"]),
    problem(mask=["causal"], shape=(1, 32, 8, 16384, 16384)),
    problem(mask=["causal"], sink=True),
    # mma.sync: rows of 124 elements are not multiples of 16 bytes, and f32.
    problem((124, 124), mask=["causal"]),
    problem((124, 124), score_mod=["softcap:30"], mask=["causal"]),
    problem((124, 124), mask=["causal"], dropout=0.1),
    problem(mask=["causal"], dtype="f32", shape=(1, 16, 16, 4096, 4096)),
    problem((124, 124), mask=["causal"], backward=True),
    problem((124, 124), score_mod=["softcap:30"], mask=["causal"], backward=True),
    problem((124, 124), mask=["causal"], dropout=0.1, backward=True),
    problem(mask=["causal"], dtype="f32", shape=(1, 16, 16, 4096, 4096), backward=True),
]


class Build:
    def __init__(self, binary):
        self.process = subprocess.Popen([binary, "time"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ms(self, question, calls):
        self.process.stdin.write(json.dumps(question | {"turn": {"own": True, "calls": calls}}) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                answer = json.loads(line)
                return answer.get("ms") or sys.exit(f"{question}: {answer}")
        sys.exit(f"{self.process.args[0]} ended")


def main(old, new, out, seconds="120"):
    builds, began = (Build(old), Build(new)), time.time()
    with open(out, "w") as file:
        for question in PROBLEMS:
            if time.time() - began > float(seconds):
                print("no time is left for the other problems")
                break
            first = [build.ms(question, 3) for build in builds]
            calls, times = max(3, int(MEASURED_MS / first[0])), ([], [])
            for turn in range(ROUNDS):
                for which in (0, 1) if turn % 2 == 0 else (1, 0):
                    times[which].append(builds[which].ms(question, calls))
            before, after = map(statistics.median, times)
            low, middle, high = statistics.quantiles((y / x for x, y in zip(*times)), n=4)
            row = question | dict(calls=calls, before_ms=before, after_ms=after, ratio=after / before, paired=middle, low=low, high=high)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{after / before:.4f}, paired {middle:.4f} [{low:.4f} {high:.4f}], {before:.4f} ms", question, flush=True)


if __name__ == "__main__":
    if not 4 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
