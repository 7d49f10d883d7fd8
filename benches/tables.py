"""Writes the tables of docs/benchmarks.md and README.md from the newest raw files in benches/results.

    python3 benches/tables.py            rewrite the tables
    python3 benches/tables.py --check    fail if a page differs

A table is between `<!-- made by benches/tables.py: NAME -->` and `<!-- end -->`. Every speedup is their time / ours: above 1, sdpa is faster.
"""
import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benches/results"
MASKS = {
    "sliding-window:512": "sliding window of 512", "prefix-lm:512": "prefix LM of 512", "dilated:4 & causal": "dilated by 4, causal",
    "natten:257": "NATTEN of 257", "shared-prefix:512 & causal": "shared prefix of 512, own document, causal",
    "global-local:256,64": "64 global tokens, local 256", "array:qk": "boolean array over (q, k)", "document & causal": "8 documents by ids, causal",
}
PEERS = {
    "cudnn": "cuDNN, by sdpa", "sdpa cuDNN": "cuDNN, by PyTorch", "fa4": "FlashAttention-4", "flex triton": "FlexAttention, Triton",
    "flex FLASH": "FlexAttention, FLASH",
}
PASSES = ("forward", "backward")
SPEEDUP = "in parentheses: speedup of sdpa (their time ÷ ours)"


def newest(kind):
    return max(RESULTS.glob(f"*-{kind}"))


def read(path):
    """The JSON lines of a raw file; text around them is for readers."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def source(path, about):
    return f"{path.name[:10]}, {about} (`{path.name}`).\n\n"


def machine(path):
    """The first line of a file of benches/rates.py: GPU, PyTorch, and cuDNN."""
    return path.open().readline().strip("# \n").replace("its cuDNN 91900", "cuDNN 9.19.0")


def table(head, rows):
    """The first columns are left-aligned, times and speedups right-aligned: those whose heading ends with a tab."""
    line = lambda cells: "| " + " | ".join(cells) + " |\n"
    rule = "|" + "|".join("---:" if name.endswith("\t") else "---" for name in head) + "|\n"
    return line([name.strip() for name in head]) + rule + "".join(map(line, rows))


def milliseconds(ms):
    return f"{ms:.{1 if ms >= 10 else 2 if ms >= 1 else 3 if ms >= 0.1 else 4}f}"


def against(theirs, ours, digits=2):
    return f"{milliseconds(theirs)} ({theirs / ours:.{digits}f}×)" if theirs else "–"


def dims(batch, heads_q, heads_kv, seq, dim):
    heads = heads_q if heads_q == heads_kv else f"{heads_q}/{heads_kv}"
    return f"B={batch} H={heads} S={seq} D={dim}"


def shape(row):
    return dims(*row["shape"])


def named(mods, masks):
    return [mod.replace("softcap:", "softcap ").replace("alibi", "ALiBi") for mod in mods] + [MASKS.get(mask, mask) for mask in masks]


def workload(row):
    return ", ".join(named(row["score_mod"], row["mask"]) + ["packed"] * bool(row["documents"])) or "no mask"


def time(row, name, direction):
    return row["ms"].get(name, (None, None))[direction]


def speedup(row, names, direction):
    """Of the fastest of these peers; none if none ran."""
    times = [ms for name in names if (ms := time(row, name, direction))]
    return min(times) / time(row, "own", direction) if times else None


def rates():
    path = newest("h100-rates.jsonl")
    return path, read(path)


def is_plain(row):
    return row["mask"] in ([], ["causal"]) and not row["score_mod"] and not row["documents"]


GROUPS = {
    "a score_mod computes: softcap 30, ALiBi": lambda row: bool(row["score_mod"]),
    "masks that skip blocks": lambda row: row["mask"] not in ([], ["causal"], ["array:qk"]),
    "a boolean array, read element by element": lambda row: row["mask"] == ["array:qk"],
    "packed sequences, causal": lambda row: bool(row["documents"]),
    "no mask or causal, D = 256": lambda row: is_plain(row) and row["shape"][4] == 256,
    "no mask or causal, S ≥ 4096, D = 64, 128": lambda row: is_plain(row) and row["shape"][3] >= 4096 and row["shape"][4] < 256,
    "no mask or causal, S = 1024, 2048": lambda row: is_plain(row) and row["shape"][3] < 4096,
}


def expect():
    path, rows = rates()
    peers = {"cuDNN": ("cudnn", "sdpa cuDNN")} | {PEERS[name]: (name,) for name in ("fa4", "flex triton", "flex FLASH")}

    def cell(found, names, direction):
        found = sorted(s for row in found if (s := speedup(row, names, direction)))
        return "–" if not found else f"{found[0]:.2f}×" if len(found) == 1 else f"{found[0]:.2f}× to {found[-1]:.2f}×"

    def lines():
        for name, is_in in GROUPS.items():
            found = [row for row in rows if is_in(row)]
            for direction, way in enumerate(PASSES):
                yield [name, str(len(found)), way, *(cell(found, names, direction) for names in peers.values())]

    head = ["workload", "problems\t", "pass", *(f"{peer}\t" for peer in peers)]
    return source(path, f"{machine(path)}, bf16: lowest and highest speedup of the native CUDA kernels") + table(head, lines())


def slower():
    path, rows = rates()
    found = []
    for row in rows:
        for direction, way in enumerate(PASSES):
            ours = time(row, "own", direction)
            name = min((name for name in PEERS if time(row, name, direction)), key=lambda name: time(row, name, direction))
            theirs = time(row, name, direction)
            if theirs / ours < 0.985:
                cells = [workload(row), shape(row), way, milliseconds(ours), f"{milliseconds(theirs)}, {PEERS[name]}", f"{theirs / ours:.2f}×"]
                found.append((theirs / ours, cells))
    head = ["workload", "shape", "pass", "sdpa, ms\t", "fastest other, ms\t", "speedup\t"]
    about = f"passes in which another library is at least 1.5 % faster: {len(found)} of {2 * len(rows)}"
    return source(path, about) + table(head, [cells for _, cells in sorted(found, key=lambda one: one[0])])


def peers_table(path, rows, peers, about):
    def lines():
        for row in rows:
            for direction, way in enumerate(PASSES):
                ours = time(row, "own", direction)
                yield [workload(row), shape(row), way, milliseconds(ours), *(against(time(row, peer, direction), ours) for peer in peers)]

    head = ["workload", "shape", "pass", "sdpa, native\t", *(f"{PEERS[peer]}\t" for peer in peers)]
    return source(path, about) + table(head, lines())


def ordered(rows):
    """In the order of benches/rates.py; processes end in any order."""
    kinds, masks = ("rate", "usual", "mask", "packed"), [*MASKS]

    def place(row):
        dim, known = row["shape"][4], [masks.index(mask) for mask in row["mask"] if mask in masks]
        return kinds.index(row["row"]), dim == 64, dim == 256, row["score_mod"], known, row["mask"], row["shape"]

    return sorted((row for row in rows if row["row"] in kinds), key=place)


def h100():
    path, rows = rates()
    return peers_table(path, ordered(rows), PEERS, f"{machine(path)}, bf16: milliseconds; {SPEEDUP}")


def lengths():
    path, rows = rates()
    rows = sorted((row for row in rows if row["row"] == "length"), key=lambda row: (row["shape"][4], row["mask"], row["shape"][3]))

    def lines():
        for row in rows:
            for direction, way in enumerate(PASSES):
                ours = time(row, "own", direction)
                peers = (against(time(row, peer, direction), ours) for peer in PEERS)
                yield [workload(row), shape(row), way, f"{milliseconds(ours)} ({row['flops'][direction] / ours / 1e9:.0f})", *peers]

    head = ["workload", "shape", "pass", "sdpa, native (TFLOP/s)\t", *(f"{peer}\t" for peer in PEERS.values())]
    return source(path, f"{machine(path)}, bf16: milliseconds; {SPEEDUP}") + table(head, lines())


def h200():
    path = newest("h200-rates.jsonl")
    # Kernels for these changed after this run.
    changed = lambda row: row["shape"][4] == 256 or row["score_mod"] == ["alibi"] or row["mask"] == ["dilated:4 & causal"]
    rows = [row for row in ordered(read(path)) if not changed(row)]
    return peers_table(path, rows, ["cudnn", "sdpa cuDNN", "flex triton"], f"{machine(path)}, bf16: milliseconds; {SPEEDUP}")


def random_problems():
    paths = [newest(f"choice{part}.jsonl") for part in ("", "-others", "-functions")]
    rows = [row for path in paths for row in read(path)]
    queries, keys = lambda row: row["shape"]["seq_q"], lambda row: row["shape"]["seq_kv"]
    groups = {
        "forward, more than 128 queries": lambda row: not row["backward"] and queries(row) > 128,
        "forward, 2 to 128 queries": lambda row: not row["backward"] and 1 < queries(row) <= 128,
        "forward, one query": lambda row: not row["backward"] and queries(row) == 1,
        "backward": lambda row: row["backward"],
    }

    def lines():
        for name, is_in in groups.items():
            found = sorted(row["cudnn_ms"] / row["cuda_ms"] for row in rows if is_in(row))
            at = lambda part: f"{found[int(part * (len(found) - 1))]:.2f}×"
            ahead = sum(speed >= 1 for speed in found) / len(found)
            yield [name, str(len(found)), f"{statistics.median(found):.2f}×", at(0.1), at(0.9), f"{100 * ahead:.0f} %"]

    about = f"H100, cuDNN 9.19: {len(rows)} problems drawn at random, speedup of the native CUDA kernels over cuDNN"
    names = ", ".join(f"`{path.name}`" for path in paths)
    head = ["pass", "problems\t", "median\t", "10th percentile\t", "90th percentile\t", "native is faster in\t"]
    return f"{paths[0].name[:10]}, {about} ({names}).\n\n" + table(head, lines())


def packed():
    path = newest("h200-packed.txt")
    rows = [row for row in read(path) if "theirs" in row]

    def lines():
        for row in rows:
            (heads_q, heads_kv), average = row["heads"], row["total"] // row["documents"]
            uneven = "" if average == row["longest"] else f", the longest {row['longest']}"
            what = f"{row['documents']} sequences of {average}{' on average' if uneven else ''}{uneven}, H={heads_q}/{heads_kv} D={row['dim']}"
            for direction, way in enumerate(PASSES):
                ours, theirs, workspace = (of[direction] for of in (row["ours"], row["theirs"]["flex"], row["workspace"]))
                yield [what, way, milliseconds(ours), against(theirs, ours), f"{workspace / 2**20:.3g} MiB"]

    head = ["packed sequences, causal", "pass", "cuDNN, by sdpa\t", "FlexAttention, Triton\t", "workspace of sdpa\t"]
    return source(path, f"H200, cuDNN 9.19, bf16: milliseconds; {SPEEDUP}") + table(head, lines())


def sinks():
    path = newest("h200-options.txt")

    def lines():
        for row in (row for row in read(path) if "without_sink" in row):
            batch, heads_q, heads_kv, seq, _, dim = row["shape"]
            for direction, way in enumerate(PASSES):
                ours = row["ours"][direction][0]
                mask = f"window of {row['window']}" if row["window"] else "causal"
                theirs, without = row["flex"][direction], row["without_sink"][direction]
                yield [mask, dims(batch, heads_q, heads_kv, seq, dim), way, milliseconds(ours), against(theirs, ours), milliseconds(without)]

    head = ["mask", "shape", "pass", "cuDNN, by sdpa\t", "FlexAttention\t", "sdpa without sinks\t"]
    return source(path, f"H200, cuDNN 9.19, bf16: milliseconds; {SPEEDUP}") + table(head, lines())


def decode():
    path = newest("h200-rows.txt")
    kinds = ["contiguous", "lengths", "paged 16", "paged 64", "paged 128", "paged 64, sink"]

    def lines():
        for row in (row for row in read(path) if "tb_per_s" in row):
            batch, heads_q, heads_kv, _, keys, dim = row["shape"]
            ours = [f"{row['ours'][kind]['tb_per_s']:.2f}" for kind in kinds]
            theirs = row["tb_per_s"]
            # Rates: ours / theirs is their time / ours.
            speed = row["ours"]["contiguous"]["tb_per_s"] / theirs["cudnn"]
            yield [dims(batch, heads_q, heads_kv, keys, dim), *ours, f"{theirs['cudnn']:.2f} ({speed:.2f}×)", f"{theirs['copy']:.2f}"]

    head = ["one query, S keys", *(f"{kind}\t" for kind in kinds), "PyTorch, cuDNN\t", "copy\t"]
    about = "H200, cuDNN 9.19, bf16: TB/s, each key and value counted once; *contiguous* to *paged 64, sink*: cuDNN, by sdpa; " \
        "in parentheses: speedup of *contiguous* (their time ÷ ours)"
    return source(path, about) + table(head, lines())


def dropout():
    path = newest("h200-dropout-speed.txt")

    def lines():
        for row in read(path):
            batch, heads_q, heads_kv, seq, _, dim = row["shape"]
            for direction, way in enumerate(PASSES):
                of = lambda kind, name: row[kind][name][direction]
                ours = of("dropout", "ours")
                theirs = [against(of("dropout", name), ours) for name in ("cudnn", "flash")]
                yield [dims(batch, heads_q, heads_kv, seq, dim), way, milliseconds(ours), *theirs, milliseconds(of("without", "ours"))]

    head = ["shape", "pass", "cuDNN, by sdpa\t", "PyTorch, cuDNN\t", "PyTorch, flash\t", "sdpa without dropout\t"]
    return source(path, f"H200, cuDNN 9.19, bf16, causal, p = 0.1: milliseconds; {SPEEDUP}") + table(head, lines())


def pieces():
    path = newest("h200-pieces.txt")
    lines = [line for line in path.read_text().splitlines() if line[:1].isdigit() and line.count(",") >= 9 and '"' in line]
    shown = [("prefix-lm:512", "4", "4096"), ("prefix-lm:2048", "4", "4096"), ("prefix-lm:512", "4", "2048"), ("prefix-lm:512", "1", "2048"),
             ("prefix-lm:512", "4", "1024"), ("prefix-lm:64", "4", "1024")]

    def rows():
        for line in lines:
            start, mask, rest = line.split('"')[:3]
            batch, heads_q, heads_kv, seq, dim = start.rstrip(",").split(",")
            _, mod, way, whole, parts = rest.split(",")
            if (mask, batch, seq) in shown and (heads_q, heads_kv, dim, mod) == ("32", "8", "128", ""):
                whole, parts = float(whole), float(parts)
                what, where = mask.replace("prefix-lm:", "prefix LM of "), dims(batch, heads_q, heads_kv, seq, dim)
                yield [what, where, way, milliseconds(whole), milliseconds(parts), f"{whole / parts:.2f}×"]

    head = ["mask", "shape", "pass", "one pass, ms\t", "band by band, ms\t", "speedup\t"]
    return source(path, "H200, cuDNN 9.19, bf16") + table(head, rows())


def forms():
    path = newest("h200-forms-9.27.txt")

    def lines():
        for row in (row for row in read(path) if row["shape"][0] == 4):
            batch, heads_q, heads_kv, seq, _, dim = row["shape"]
            what = ", ".join(named(row["mods"], row["masks"])) or "no mask"
            of = lambda name: milliseconds(row[name])
            slow = f"{of('deterministic')} ({row['backward'] / row['deterministic']:.2f}×)"
            yield [what, dims(batch, heads_q, heads_kv, seq, dim), of("composite"), of("unified"), of("backward"), slow]

    head = ["score_mod, mask", "shape", "composite, forward\t", "unified, forward\t", "backward\t", "deterministic backward\t"]
    return source(path, "H200, cuDNN 9.27, bf16: milliseconds; in parentheses: speedup over the column backward") + table(head, lines())


def stack():
    path = newest("h200-stack.txt")

    def lines():
        for row in read(path):
            ours = row["ours"]["ms"]
            memory = lambda name: f", {row[name]['peak_mib']:.0f} MiB"
            others = [against(row[name]["ms"], ours) + memory(name) for name in ("cudnn", "flash", "math")]
            yield [f"B={row['batch']} H={row['heads']} S={row['seq']} D={row['dim']}", milliseconds(ours) + memory("ours"), *others]

    head = ["shape", "cuDNN, by sdpa\t", "PyTorch, cuDNN\t", "PyTorch, flash\t", "PyTorch, math\t"]
    return source(path, f"H200, cuDNN 9.19, bf16: milliseconds, peak memory; {SPEEDUP}") + table(head, lines())


def readme():
    _, rows = rates()
    peers = ["fa4", "flex triton", "flex FLASH", "sdpa cuDNN"]
    broad = [4, 32, 32, 4096, 128]
    shown = [(["softcap:30"], ["causal"], broad), ([], ["natten:257"], broad), ([], ["causal"], [8, 32, 8, 2048, 128]), ([], ["causal"], broad),
             ([], [], broad), ([], ["causal"], [16, 16, 16, 1024, 64])]

    def lines():
        for mods, mask, dims in shown:
            row = next(row for row in rows if (row["score_mod"], row["mask"], row["shape"]) == (mods, mask, dims))
            for direction, way in enumerate(PASSES):
                times = [ms for name in ["own", *peers] if (ms := time(row, name, direction))]
                bold = lambda text, ms: f"**{text}**" if ms == min(times) else text
                ours = time(row, "own", direction)
                cells = [bold(against(ms, ours, 1), ms) if (ms := time(row, peer, direction)) else "–" for peer in peers]
                yield [workload(row) if not direction else "", shape(row) if not direction else "", way, bold(milliseconds(ours), ours), *cells]

    head = ["workload", "shape", "pass", "sdpa\t", "FlashAttention-4\t", "FlexAttention, Triton\t", "FlexAttention, FLASH\t", "PyTorch, cuDNN\t"]
    return table(head, lines())


TABLES = {
    "expect": expect, "slower": slower, "h100": h100, "lengths": lengths, "h200": h200, "random": random_problems, "packed": packed, "sinks": sinks,
    "decode": decode, "dropout": dropout, "pieces": pieces, "deterministic": forms, "stack": stack, "readme": readme,
}


def made(page):
    parts, end = page.split("<!-- made by benches/tables.py: "), "<!-- end -->"
    out = parts[0]
    for part in parts[1:]:
        name, rest = part.split(" -->\n", 1)
        out += f"<!-- made by benches/tables.py: {name} -->\n{TABLES[name]()}{end}{rest.split(end, 1)[1]}"
    return out


def main(arguments):
    if arguments not in ([], ["--check"]):
        sys.exit(__doc__)
    for path in (ROOT / "docs/benchmarks.md", ROOT / "README.md"):
        old = path.read_text()
        new = made(old)
        if arguments and new != old:
            sys.exit(f"{path.relative_to(ROOT)} differs: run python3 benches/tables.py")
        if new != old:
            path.write_text(new)


main(sys.argv[1:])
