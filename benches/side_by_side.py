"""What the side-by-side scripts share: device time by CUDA events, and our side in a process of its own."""
import json
import statistics
import subprocess
import torch

WARM, RUNS = 5, 20


def median(call):
    times = []
    for n in range(WARM + RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        if n >= WARM:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


class Ours:
    def __init__(self, binary, told=None):
        self.process = subprocess.Popen([binary, "time"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.told = told

    def ask(self, shape, mods, masks, backward, **more):
        names = ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "dim_qk", "dim_v")
        question = dict(shape=dict(zip(names, (*shape, shape[-1]))), dtype="bf16", layout="bhsd")
        question.update(score_mod=mods, mask=masks, backward=backward, **more)
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
            # What it runs on.
            print("#", line.split(" from ")[0].strip(), file=self.told)
        raise RuntimeError(f"{self.process.args[0]} ended")
