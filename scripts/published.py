#!/usr/bin/env python3
"""published.py [--without NAME]…: the names of the crates that are published, each after those that it depends on."""

import json
import subprocess
import sys

metadata = json.loads(subprocess.run(["cargo", "metadata", "--no-deps", "--format-version", "1"], check=True, capture_output=True, text=True).stdout)
# `publish = false` is an empty list of registries.
packages = {package["name"]: package for package in metadata["packages"] if package["publish"] is None}
without = {name for flag, name in zip(sys.argv[1:], sys.argv[2:]) if flag == "--without"}
if unknown := without - packages.keys():
    sys.exit(f"published.py: no published crate is named {', '.join(sorted(unknown))}")

done: list[str] = []


def visit(name: str) -> None:
    for dependency in sorted(d["name"] for d in packages[name]["dependencies"] ):
        if dependency in packages and dependency not in done:
            visit(dependency)
    if name not in done:
        done.append(name)


for name in sorted(packages):
    visit(name)
print("\n".join(name for name in done if name not in without))
