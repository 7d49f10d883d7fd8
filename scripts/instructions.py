"""instructions.py HOT BASELINE [--bless]: counts what scripts/instructions.sh compares."""

import os
import platform
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

# benches/src/bin/hot.rs says what they are.
PATHS = ["prepared", "found", "functional", "validate", "addresses"]
PATHS += ["softcap", "bias", "lengths", "copies", "backward", "backward-softcap", "backward-bias", "chosen", "cudarc", "cudarc-backward"]
# Whole rounds of whatever a cache does only now and then.
CALLS = 1280
# The function of hot.rs that makes them, as callgrind names it: what it does not call is set-up, and does not count.
COUNTED = "*calls_that_count*"
TOLERANCE = 0.03
RECORDER = "librecording.so"


def costs(profile):
    """Instructions in all, and in the recording library with what it calls, of a file that callgrind wrote."""
    names, total, recorder = {}, 0, 0
    here, callee, called = "", None, False

    def name(text):
        number, _, given = text.partition(" ")
        return names.setdefault(number, given)

    for line in profile.read_text(errors="replace").splitlines():
        key, equals, value = line.partition("=")
        if line.startswith(tuple("0123456789+-*")):
            fields = line.split()
            cost = int(fields[1]) if len(fields) > 1 else 0
            if not called:
                total += cost
            elif callee.endswith(RECORDER) and not here.endswith(RECORDER):
                recorder += cost
            if called:
                callee, called = None, False
        elif equals and key == "ob":
            here = name(value)
        elif equals and key == "cob":
            callee = name(value)
        elif equals and key == "calls":
            callee, called = here if callee is None else callee, True
        elif line.startswith("totals:") and int(line.split()[1]) != total:
            sys.exit(f"instructions: {profile} has {line}, and its lines come to {total}")
    return total, recorder


def measure(hot, path):
    """Of one call: instructions, those of the recording library besides, allocations."""
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile"
        # cudarc looks for the driver by itself.
        for name in ["libcuda.so", "libcuda.so.1"]:
            (Path(folder) / name).symlink_to(Path(hot).resolve().parent / RECORDER)
        environment = os.environ | {"LD_LIBRARY_PATH": folder}
        command = ["valgrind", "--quiet", "--tool=callgrind", f"--toggle-collect={COUNTED}", f"--callgrind-out-file={profile}"]
        command += [hot, path, str(CALLS)]
        ended = subprocess.run(command, capture_output=True, text=True, env=environment)
        if ended.returncode != 0:
            sys.exit(f"instructions: {' '.join(command)} ended with {ended.returncode}: {ended.stdout}{ended.stderr}")
        total, recorder = costs(profile)
    if total == 0:
        sys.exit(f"instructions: callgrind found no function {COUNTED} in {hot}")
    return {"instructions": round((total - recorder) / CALLS), "recorder": round(recorder / CALLS), "allocations": int(ended.stdout) / CALLS}


def tools():
    """What else decides the counts."""
    said = lambda *command: subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {"rustc": said("rustc", "--version"), "libc": " ".join(platform.libc_ver()), "valgrind": said("valgrind", "--version")}


def write(baseline, found, made_with):
    lines = ["# Instructions and heap allocations of one call by each path of benches/src/bin/hot.rs, without those of the recording"]
    lines += ["# library. Written by scripts/instructions.sh --bless; counts move with the tools."]
    lines += [f'{tool} = "{version}"' for tool, version in made_with.items()]
    for path, counts in found.items():
        lines += ["", f"[{path}]", f"instructions = {counts['instructions']}", f"allocations = {counts['allocations']:g}"]
    baseline.write_text("\n".join(lines) + "\n")


def main():
    hot, baseline, *options = sys.argv[1:]
    baseline = Path(baseline)
    found = {path: measure(hot, path) for path in PATHS}
    if options == ["--bless"]:
        write(baseline, found, tools())
    elif options:
        sys.exit(f"instructions: {' '.join(options)} is no option; there is --bless")
    want = tomllib.loads(baseline.read_text())
    wrong = []
    print("instructions of a call, allocations, instructions of the baseline, difference; of the recording library besides")
    for path, counts in found.items():
        was = want[path]
        off = counts["instructions"] / was["instructions"] - 1
        print(
            f"  {path:16} {counts['instructions']:7} {counts['allocations']:5g} {was['instructions']:8} {off:+8.2%}"
            f"   + {counts['recorder']}"
        )
        if abs(off) > TOLERANCE:
            wrong.append(f"{path}: {counts['instructions']} instructions, the baseline has {was['instructions']} ({off:+.1%})")
        if counts["allocations"] != was["allocations"]:
            wrong.append(f"{path}: {counts['allocations']:g} allocations, the baseline has {was['allocations']:g}")
    if wrong:
        print(f"beyond {TOLERANCE:.0%} of {baseline}; scripts/instructions.sh --bless writes it anew where that is meant:")
        print("\n".join(f"  {line}" for line in wrong))
        for tool, version in tools().items():
            if version != want[tool]:
                print(f"  the baseline was made with {want[tool]}, this is {version}")
        sys.exit(1)


main()
