"""The path to a GPU without one. cuDNN and the driver are the workspace's library `recording`, which checks everything that is submitted and computes nothing.
A real NVRTC compiles native CUDA kernels, if the tests of the workspace have one. Each test runs in its own process, because libraries are selected once per
process."""

import os
import pathlib
import subprocess
import sys

import pytest

TARGET = pathlib.Path(__file__).resolve().parents[3] / "target"
LIBRARY = os.environ.get("SDPA_RECORDING") or str(TARGET / "debug" / "librecording.so")
NVRTC = os.environ.get("SDPA_NVRTC") or str(pathlib.Path(LIBRARY).parents[1] / "cudnn" / "9.27" / "nvidia" / "cu13" / "lib")
pytestmark = pytest.mark.skipif(not os.path.exists(LIBRARY), reason=f"SKIP {LIBRARY} is not there: cargo build --package recording")

with_nvrtc = pytest.mark.skipif(not os.path.exists(NVRTC), reason=f"SKIP {NVRTC} is not there: scripts/setup-tests.sh")

BEGIN = """
import ctypes, os, sys
import sdpa
from sdpa import _native
library, nvrtc = sys.argv[1:3]
_native.use_libraries(sys.argv[3] or library, nvrtc)
driver = ctypes.CDLL(library)

def memory(size):
    at, context = ctypes.c_uint64(), ctypes.c_void_p()
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and driver.cuCtxSetCurrent(context) == 0
    assert driver.cuMemAlloc_v2(ctypes.byref(at), ctypes.c_size_t(max(size, 256))) == 0
    return at.value

Q, K = (2, 8, 512, 64), (2, 2, 512, 64)
def dense(d):
    return d, (d[1] * d[2] * d[3], d[2] * d[3], d[3], 1), 16
FORWARD = [dense(Q), dense(K), dense(K), dense(Q)]
BACKWARD = [*FORWARD, dense(Q), dense(Q), dense(K), dense(K)]
BYTES = {Q: 2 * 2 * 8 * 512 * 64, K: 2 * 2 * 2 * 512 * 64}
def bias(executor, masks='"causal"'):
    named = "" if executor is None else ',"executor":"' + executor + '"'
    mod = "tensor t[head, q, k]: bf16; tanh((score + t) / 30.0) * 30.0"
    return _native.Program('{"score_mods":["' + mod + '"],"masks":[' + masks + '],"tensors":["t"]' + named + '}')
BIAS = bias("cudnn")
def masked(text, executor=None):
    return _native.Program('{"masks":["' + text + '"]' + ("" if executor is None else ',"executor":"' + executor + '"') + '}')
RULE = masked("dilated:4 & causal")
SINES = _native.Program('{"score_mods":["score + sin(score) + cos(score) + sin(score * 2.0)"],"masks":["causal"]}')
WITH_ERF = _native.Program('{"score_mods":["score + sin(score) + cos(score) + sin(score * 2.0) + erf(score)"],"masks":["causal"]}')
"""


def run(text, cudnn="", nvrtc=NVRTC, more=(), environment=None):
    env = os.environ | {"CUDNN_GRAPH_DRIVER": LIBRARY, "SDPA_CACHE": "off"} | (environment or {})
    done = subprocess.run([sys.executable, "-c", BEGIN + text, LIBRARY, nvrtc, cudnn, *more], env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SUBMIT = """
for tensors, wrt in ((FORWARD, []), (BACKWARD, [("t", "bf16")])):
    plan = BIAS.plan(0, "bf16", tensors, True, wrt)
    operands = [memory(BYTES[dims]) for dims, _, _ in tensors]
    bias, stats, workspace = memory(2 * 8 * 512 * 512), memory(4 * 2 * 8 * 512), memory(plan.workspace_bytes)
    def submit(**changed):
        given = dict(operands=operands, stats=stats, params=[(bias, "bf16", 8 * 512 * 512)], scalars=[], gradients=[memory(2 * 8 * 512 * 512) for _ in wrt], scale=0.125, threads=1, stream=0, workspace=workspace)
        plan.run(**given | changed)
"""


TOLD = """
    submit()
    print(plan.engine, plan.library[:2], plan.calls, 'hit' in plan.explain(), plan.others())
print([cache["name"] for cache in __import__("json").loads(_native.cache_trace(0))["caches"]])
"""


def test_both_passes_are_submitted():
    said = run(SUBMIT + TOLD)
    assert said.count("cudnn composite") == 2 and said.count("('cuDNN', '9.19.0') 1 True [('cuda', ['not tried: the caller named cudnn'])]") == 2
    assert said.splitlines()[-1] == "['forward', 'backward']"


@with_nvrtc
def test_both_passes_are_submitted_to_kernels_of_our_own():
    said = run("BIAS = bias('cuda')" + SUBMIT + TOLD, cudnn="/nowhere/libcudnn.so.9")
    assert "cuda forward" in said and "cuda backward" in said and said.count("1 True [('cudnn', ['not tried: the caller named cuda'])]") == 2
    assert said.count("('NVRTC', '1") == 2 and said.splitlines()[-1] == "['cuda', 'cuda kernels']"


CHOSEN = """
for program in (RULE, SINES):
    for tensors in (FORWARD, BACKWARD):
        plan = program.plan(0, "bf16", tensors, True, [])
        print(plan.executor, plan.others())
"""


# A version of cuDNN without a ledger.
WITHOUT_LEDGER = {"RECORDING_CUDNN": "91901"}


@with_nvrtc
def test_kernels_of_our_own_come_first_but_for_exceptions():
    rule, rule_back, sines, sines_back = run(CHOSEN, environment=WITHOUT_LEDGER).splitlines()
    for line in (rule, rule_back):
        assert line.startswith("cuda [('cudnn', ['not tried: native CUDA kernels come first on this device'])]")
    for line, what in ((sines, "more than 128 queries, a score_mod with 2 to 15 calls of sin or cos, no element-wise mask; native kernels are 0.78 times"), (sines_back, "a score_mod with 3 to 30 calls of sin or cos ")):
        assert line.startswith("cudnn [('cuda', [") and f"not tried: cuDNN first: {what}" in line


@with_nvrtc
def test_kernels_of_our_own_come_first_where_the_ledger_of_cudnn_does_not_cover_the_problem():
    *_, sines, sines_back = run(CHOSEN).splitlines()
    assert sines.startswith("cudnn [('cuda', [") and sines_back.startswith("cudnn [('cuda', ["), "the ledger proves sines"
    # An exception like that for sines, but with a function that the ledger does not cover.
    for line in run(CHOSEN.replace("(RULE, SINES)", "(WITH_ERF,)")).splitlines():
        assert line.startswith("cuda [('cudnn', ['not tried: unproven on cuDNN 9.19.0, sm 90: `erf` in a score_mod"), line
    unproven = """
for text in ("causal", "dilated:4 & causal"):
    print(masked(text, "cudnn").plan(0, "bf16", FORWARD, True, []).unproven)
"""
    none, rule = run(unproven).splitlines()
    assert none == "None" and rule.startswith("unproven on cuDNN 9.19.0, sm 90: index `q` in a mask with a causal mask; ")
    missing = "unproven on cuDNN 9.19.1, sm 90: there is no ledger for this version and architecture"
    assert run(unproven, environment=WITHOUT_LEDGER).splitlines() == [missing, missing]


@with_nvrtc
def test_where_there_is_no_cudnn_kernels_of_our_own_are_enough():
    said = run(CHOSEN, cudnn="/nowhere/libcudnn.so.9").splitlines()
    assert all(line.startswith("cuda ") for line in said) and all("/nowhere/libcudnn.so.9" in line for line in said[2:])


def test_where_there_is_no_nvrtc_cudnn_is_enough():
    said = run(CHOSEN, nvrtc="/nowhere/libnvrtc.so.13").splitlines()
    assert all(line.startswith("cudnn ") for line in said) and all("/nowhere/libnvrtc.so.13" in line for line in said[:2])


@with_nvrtc
def test_a_pass_that_one_library_does_not_support_runs_on_the_other():
    said = run("""
print(masked("causal").plan(0, "f32", FORWARD, True, []).executor)
wide = [((2, h, 512, 264), (h * 512 * 264, 512 * 264, 264, 1), 16) for h in (8, 2, 2, 8)]
try:
    masked("causal").plan(0, "bf16", wide, True, [])
except sdpa.UnsupportedError as e:
    import pickle
    print(e.executor, [who for who, _ in e.before], sorted({line.split(":")[0] for line in str(e).split("\\n")}), str(pickle.loads(pickle.dumps(e))) == str(e))
""")
    # No ledger covers head dims of 264, so cuDNN was tried last.
    assert said == "cuda\ncudnn ['cuda'] ['cuda', 'cudnn'] True\n"


FILES = """
made = [BIAS.plan(0, "bf16", tensors, True, wrt) for tensors, wrt in ((FORWARD, []), (BACKWARD, [("t", "bf16")]))]
name, path = made[0].executor, sys.argv[4]
print(_native.save_plans(0, path, name), _native.attach_plans(0, path))
for wrong in ((path + ".none", name), (path, "cpu")):
    try:
        _native.save_plans(0, *wrong) if wrong[1] == "cpu" else _native.attach_plans(0, wrong[0])
    except sdpa.SpecError as e:
        print(e)
open(path, "wb").write(b"other")
try:
    _native.attach_plans(0, path)
except sdpa.SpecError as e:
    print(str(e).startswith("path: got " + path))
"""


@with_nvrtc
@pytest.mark.parametrize("executor", ["cudnn", "cuda"])
def test_what_was_made_is_kept_in_a_file(executor, tmp_path):
    path = str(tmp_path / "plans.bin")
    counts, absent, nobody, damaged = run(f"BIAS = bias('{executor}')" + FILES, more=(path,)).splitlines()
    saved, attached = map(int, counts.split())
    assert saved == attached == 2 and damaged == "True"
    assert absent.startswith(f"path: got {path}.none, expected ") and nobody == 'executor: got "cpu", expected one that makes plans or kernels: cudnn, cuda'


def test_names_of_executors_are_looked_at():
    said = run("""
for make in (lambda: masked("causal", "abacus"), lambda: masked("causal", "cpu").plan(0, "bf16", FORWARD, True, []), lambda: masked("causal", "cuda").plan(None, "bf16", FORWARD, True, [])):
    try:
        make()
    except sdpa.SpecError as e:
        print(e)
print(masked("causal", "cpu").plan(None, "bf16", FORWARD, True, []).executor)
""")
    assert said.splitlines() == [
        "executor: got abacus, expected one of cpu, cudnn, cuda",
        "executor: got cpu, expected one that reads tensors of an NVIDIA GPU: cudnn, cuda",
        "executor: got cuda, expected one that reads tensors in host memory: cpu",
        "cpu",
    ]


@pytest.mark.parametrize(
    "changed, word",
    [
        ("params=[(bias, 'bf16', 7)]", "parameter t"),
        ("params=[(bias, 'f32', 8 * 512 * 512)]", "as declared"),
        ("params=[(bias + 2, 'bf16', 8 * 512 * 512)]", "16"),
        ("params=[]", "1 tensors and 0 scalars"),
        ("scale=-1.0", "scale"),
        ("stats=0", "stats"),
    ],
)
@pytest.mark.parametrize("executor", ["cudnn", pytest.param("cuda", marks=with_nvrtc)])
def test_what_is_wrong_is_told_before_anything_is_submitted(changed, word, executor):
    if executor == "cuda" and changed == "scale=-1.0":
        changed, word = "scale=float('nan')", "finite"
    said = run(f"BIAS = bias('{executor}')" + SUBMIT + f"    try:\n        submit({changed})\n        print('nothing was said')\n    except sdpa.SpecError as e:\n        print(e)")
    assert said.count(word) >= 2 and "nothing was said" not in said


def test_a_pass_that_cudnn_does_not_support_is_reported_when_it_is_made():
    said = run("""
for text, dtype, tensors, wrt in (
    ('{"executor":"cudnn"}', 'f32', FORWARD, []),
    ('{"score_mods":["tensor t[head]: f32; score + t * f32(k - q)"],"tensors":["t"],"executor":"cudnn"}', 'bf16', BACKWARD, [('t', 'bf16')]),
):
    try:
        _native.Program(text).plan(0, dtype, tensors, True, wrt)
    except sdpa.UnsupportedError as e:
        print(e.executor, e.reasons)
""")
    assert said.count("cudnn [") == 2 and "dtype: got f32" in said and "gradient of parameter t" in said


def test_without_keys_or_queries_results_are_set_and_addresses_may_be_0():
    said = run("""
NO_Q, NO_K = dense((2, 8, 0, 64)), dense((2, 2, 0, 64))
rows = memory(2 * 8 * 512 * 4)
for text in ('{}', '{"executor":"cudnn"}'):
    program = _native.Program(text)
    forward = program.plan(0, "bf16", [dense(Q), NO_K, NO_K, dense(Q)], True, [])
    forward.run([memory(BYTES[Q]), 0, 0, memory(BYTES[Q])], rows, [], [], [], None, 1, 0, 0)
    backward = program.plan(0, "bf16", [NO_Q, dense(K), dense(K), NO_Q, NO_Q, NO_Q, dense(K), dense(K)], True, [])
    backward.run([0, *[memory(BYTES[K])] * 2, 0, 0, 0, *[memory(BYTES[K])] * 2], 0, [], [], [], None, 1, 0, 0)
    for plan in (forward, backward):
        print(plan.engine, plan.workspace_bytes, plan.copied, len(plan.others()), "not there" in plan.explain() or plan.explain())
    for wrong in ([0, 0, 0, memory(BYTES[Q])], [memory(BYTES[Q]), 0, 0, 0]):
        try:
            forward.run(wrong, rows, [], [], [], None, 1, 0, 0)
        except sdpa.SpecError as e:
            print("refused:", e)
""")
    assert said.count("cudnn fill: no batch entry, query or key 0 [] 1") == 4, said
    assert said.count("refused: q address: got 0x0") == 2 and said.count("refused: o address: got 0x0") == 2, said


@pytest.mark.parametrize("executor", ["cudnn", pytest.param("cuda", marks=with_nvrtc)])
def test_a_fork_does_not_take_the_gpu_with_it(executor):
    said = run(f"BIAS = bias('{executor}')" + """
plan = BIAS.plan(0, "bf16", FORWARD, True, [])
child = os.fork()
if child == 0:
    for use in (lambda: plan.run([0] * 4, 0, [(0, "bf16", 1)], [], [], None, 1, 0, 0), lambda: BIAS.plan(0, "bf16", BACKWARD, True, [])):
        try:
            use()
        except sdpa.SpecError as e:
            print("told:", e, flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""")
    assert said.count("CUDA contexts do not survive a fork") == 2


def test_without_a_driver_there_is_an_exception():
    text = "try:\n    bias(None).plan(0, 'bf16', FORWARD, True, [])\nexcept sdpa.EnvironmentError as e:\n    print('told:', e)"
    env = os.environ | {"CUDNN_GRAPH_DRIVER": "/nowhere/libcuda.so.1"}
    done = subprocess.run([sys.executable, "-c", BEGIN + text, LIBRARY, NVRTC, ""], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "told: cuda: " in done.stdout and "\ncudnn: " in done.stdout, done.stdout + done.stderr


TABLE = """
mod = sdpa.ScoreMod.from_text("table t[8, 1023]: f32; table n[512]: i32; score + t[head, n[k] - q + 511]", t=sdpa_t, n=sdpa_n)
from sdpa.mods import joined, program
for executor in (None, "cuda", "cudnn"):
    text, tensors, _ = joined(mod, None, executor=executor)
    for layout, wrt in ((FORWARD, []), (BACKWARD, [("t", "bf16")])):
        try:
            plan = program(text).plan(0, "bf16", layout, True, wrt)
        except sdpa.UnsupportedError as e:
            print(executor, e.executor, str(e).split("\\n")[0])
            continue
        operands = [memory(BYTES[dims]) for dims, _, _ in layout]
        given = {"t": (memory(4 * 8 * 1023), "f32", 8 * 1023), "n": (memory(4 * 512), "i32", 512)}
        params = [given[t.name] for t in tensors]
        plan.run(operands, memory(4 * 2 * 8 * 512), params, [], [memory(2 * 8 * 1023) for _ in wrt], 0.125, 1, 0, memory(plan.workspace_bytes))
        print(executor, plan.executor, plan.calls)
"""


@with_nvrtc
def test_tables_are_read_by_kernels_of_our_own_and_not_by_cudnn():
    names = "class Shape:\n    def __init__(self, *shape):\n        self.shape = shape\nsdpa_t, sdpa_n = Shape(8, 1023), Shape(512)\n"
    lines = run(names + TABLE).splitlines()
    assert lines[:4] == ["None cuda 1", "None cuda 1", "cuda cuda 1", "cuda cuda 1"]
    assert len(lines) == 6 and all(line.startswith("cudnn cudnn cudnn: ") and "computed" in line for line in lines[4:]), lines


CACHED = """
BIAS = bias("cuda")
BIAS.plan(0, "bf16", FORWARD, True, [])
facts = sdpa.kernel_cache()
print(facts["kernels"], facts["bytes"] > 10_000, facts["limit_bytes"] >> 20, facts["refused"], facts["folder"])
"""
OFF = """
sdpa.set_kernel_cache(False)
assert sdpa.kernel_cache() is None and sdpa.clear_kernel_cache() == 0
bias("cuda", '"causal","q != 3"').plan(0, "bf16", FORWARD, True, [])
sdpa.set_kernel_cache()
print(sdpa.kernel_cache()["kernels"])
bias("cuda", '"causal","q != 5"').plan(0, "bf16", FORWARD, True, [])
print(sdpa.kernel_cache()["kernels"], sdpa.clear_kernel_cache(), sdpa.kernel_cache()["kernels"])
"""


@with_nvrtc
def test_kernels_are_kept_on_disk_and_the_switch_turns_that_off(tmp_path):
    environment = {"SDPA_CACHE": "", "SDPA_CACHE_DIR": str(tmp_path / "here")}
    said = run(CACHED, cudnn="/nowhere/libcudnn.so.9", environment=environment)
    assert said.split() == ["1", "True", "256", "None", str(tmp_path / "here" / "kernels")]
    said = run(CACHED + OFF, cudnn="/nowhere/libcudnn.so.9", environment=environment)
    assert said.split()[5:] == ["1", "2", "2", "0"], said
    off = run("BIAS = bias('cuda'); BIAS.plan(0, 'bf16', FORWARD, True, []); print(sdpa.kernel_cache())", cudnn="/nowhere/libcudnn.so.9", environment=environment | {"SDPA_CACHE": "off"})
    assert off.split() == ["None"] and not list((tmp_path / "here" / "kernels").iterdir())
    # Other users may write to this folder: the kernel is compiled, and the reason is reported.
    (tmp_path / "here" / "kernels").chmod(0o777)
    said = run(CACHED, cudnn="/nowhere/libcudnn.so.9", environment=environment).split(maxsplit=3)
    assert said[0] == "0" and "other users may write to it" in said[3]


PAGED = """
from sdpa.mods import MaskMod, Packed, Paged, ScoreMod, joined, program
masks = {"causal": MaskMod.from_text("causal-ends"), "window": MaskMod.from_text("window:64,0:ends")}
context = type("Context", (), {"shape": (4,)})()
alibi = ScoreMod.from_text("tensor context[batch]: i32; score + f32(k - q - context) * 0.1", context=context)
def dense_heads(tokens, heads):  # (tokens, heads, 64) as (1, heads, tokens, 64)
    return (1, heads, tokens, 64), (tokens * heads * 64, 64, heads * 64, 1), 16
pool = (40, 2, 16, 64), (16 * 2 * 64, 64, 2 * 64, 1), 16
for executor in (None, "cuda", "cudnn"):
    for tokens, longest, mask, mod in ((4, 1, "causal", None), (70, 32, "causal", None), (71, 32, "causal", None), (70, 32, "window", alibi)):
        packed = Packed(4, longest, 128, 64 if tokens < 64 else 128, None, True, False)
        text, tensors, _ = joined(mod, masks[mask], executor=executor, packed=packed, paged=Paged(16, 40))
        q = dense_heads(tokens, 8)
        try:
            plan = program(text).plan(0, "bf16", [q, pool, pool, q], False, [])
        except sdpa.UnsupportedError as e:
            print(executor, tokens, mask, "unsupported", e.executor, str(e).split(chr(10))[0])
            continue
        size = 2 * tokens * 8 * 64
        operands = [memory(n) for n in (size, 2 * 40 * 16 * 2 * 64, 2 * 40 * 16 * 2 * 64, size)]
        params = [(memory(16), "i32", 4) for _ in tensors] + [(memory(20), "i32", 5), (memory(16), "i32", 4), (memory(4 * 4 * 8), "i32", 4 * 8)]
        plan.run(operands, 0, params, [], [], None, 1, 0, memory(plan.workspace_bytes))
        print(executor, tokens, mask, plan.executor, plan.calls)
        for at, changed in ((-1, "i32 31"), (-2, "i64 4")):
            dtype, n = changed.split()
            wrong = list(params)
            wrong[at] = (params[at][0], dtype, int(n))
            try:
                plan.run(operands, 0, wrong, [], [], None, 1, 0, memory(plan.workspace_bytes))
                print("nothing was said")
            except sdpa.SpecError as e:
                assert "page_table" in str(e) if at == -1 else "seq_len_kv" in str(e), e
"""


@with_nvrtc
def test_packed_queries_over_pages_are_submitted():
    said = run(PAGED)
    assert "nothing was said" not in said
    lines = said.splitlines()
    assert lines[:8] == [f"{executor} {tokens} {mask} cuda 1" for executor in (None, "cuda") for tokens, mask in ((4, "causal"), (70, "causal"), (71, "causal"), (70, "window"))], said
