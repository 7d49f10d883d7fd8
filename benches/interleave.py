"""interleave.py OLD NEW OUT [SECONDS]: times of the native CUDA kernels of two builds of `device`, call by call in turn.

Four processes run on the same GPU, started in the order OLD, NEW, NEW, OLD, because times also depend on where a process has its memory: two processes of
one build differ by up to 4 %. OUT gets a JSON line for each problem: the median of both builds in ms, their ratio NEW ÷ OLD, `null`, the ratio of the two
processes of OLD, and the median and quartiles of the ratios of neighbouring measurements. No problem begins after SECONDS (default 120).
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
    builds, began = [Build(binary) for binary in (old, new, new, old)], time.time()
    with open(out, "w") as file:
        for question in PROBLEMS:
            if time.time() - began > float(seconds):
                print("no time is left for the other problems")
                break
            first = [build.ms(question, 3) for build in builds]
            calls, times = max(3, int(MEASURED_MS / first[0])), [[] for _ in builds]
            for turn in range(ROUNDS):
                for which in range(4) if turn % 2 == 0 else reversed(range(4)):
                    times[which].append(builds[which].ms(question, calls))
            before, after = times[0] + times[3], times[1] + times[2]
            ratio = statistics.median(after) / statistics.median(before)
            null = statistics.median(times[3]) / statistics.median(times[0])
            low, middle, high = statistics.quantiles((y / x for x, y in zip(before, after)), n=4)
            medians = dict(before_ms=statistics.median(before), after_ms=statistics.median(after))
            row = question | medians | dict(calls=calls, ratio=ratio, null=null, paired=middle, low=low, high=high)
            file.write(json.dumps(row) + "\n")
            file.flush()
            print(f"{ratio:.4f}, null {null:.4f}, paired {middle:.4f} [{low:.4f} {high:.4f}], {before[0]:.4f} ms", question, flush=True)


if __name__ == "__main__":
    if not 4 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    main(*sys.argv[1:])
