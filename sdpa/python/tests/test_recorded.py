"""The path to a GPU without one: cuDNN and the driver are the workspace's library `recording`, which checks what is submitted to it and computes
nothing. Each test is a process of its own, as the library is chosen once."""

import os
import pathlib
import subprocess
import sys

import pytest

LIBRARY = os.environ.get("SDPA_RECORDING") or str(pathlib.Path(__file__).resolve().parents[3] / "target" / "debug" / "librecording.so")
pytestmark = pytest.mark.skipif(not os.path.exists(LIBRARY), reason=f"SKIP {LIBRARY} is not there: cargo build --package recording")

BEGIN = """
import ctypes, os, sys
import sdpa
from sdpa import _native
library = sys.argv[1]
_native.use_cudnn(library)
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
BIAS = _native.Program('{"score_mods":["tensor t[head, q, k]: bf16; tanh((score + t) / 30.0) * 30.0"],"masks":["causal"],"tensors":["t"]}')
"""


def run(text):
    env = os.environ | {"CUDNN_GRAPH_DRIVER": LIBRARY}
    done = subprocess.run([sys.executable, "-c", BEGIN + text, LIBRARY], env=env, capture_output=True, text=True, timeout=60)
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


def test_both_passes_are_submitted():
    said = run(SUBMIT + "    submit()\n    print(plan.engine, plan.library[0], plan.calls, 'hit' in plan.explain())\nprint(_native.cache_trace(0)[:60])")
    assert said.count("cudnn composite") == 2 and "True" in said and "cudnn" in said.splitlines()[-1]


@pytest.mark.parametrize(
    "changed, word",
    [
        ("params=[(bias, 'bf16', 7)]", "parameter t"),
        ("params=[(bias, 'f32', 8 * 512 * 512)]", "declared as"),
        ("params=[(bias + 2, 'bf16', 8 * 512 * 512)]", "16"),
        ("params=[]", "1 tensors and 0 scalars"),
        ("scale=-1.0", "scale"),
        ("stats=0", "stats"),
    ],
)
def test_what_is_wrong_is_told_before_anything_is_submitted(changed, word):
    said = run(SUBMIT + f"    try:\n        submit({changed})\n        print('nothing was said')\n    except sdpa.SpecError as e:\n        print(e)")
    assert said.count(word) >= 2 and "nothing was said" not in said


def test_what_cudnn_declines_is_told_when_a_pass_is_made():
    said = run("""
for text, dtype, tensors, wrt in (
    ('{}', 'f32', FORWARD, []),
    ('{"score_mods":["tensor t[head]: f32; score + t * f32(k - q)"],"tensors":["t"]}', 'bf16', BACKWARD, [('t', 'bf16')]),
):
    try:
        _native.Program(text).plan(0, dtype, tensors, True, wrt)
    except sdpa.UnsupportedError as e:
        print(e.executor, e.reasons)
""")
    assert said.count("cudnn [") == 2 and "dtype is f32" in said and "gradient of parameter t" in said


def test_a_fork_does_not_take_the_gpu_with_it():
    said = run("""
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
    assert said.count("a GPU does not survive a fork") == 2


def test_without_a_driver_there_is_an_exception():
    text = "try:\n    BIAS.plan(0, 'bf16', FORWARD, True, [])\nexcept sdpa.EnvironmentError as e:\n    print('told:', e)"
    env = os.environ | {"CUDNN_GRAPH_DRIVER": "/nowhere/libcuda.so.1"}
    done = subprocess.run([sys.executable, "-c", BEGIN + text, LIBRARY], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "told: cudnn: " in done.stdout, done.stdout + done.stderr
