"""The settings of the kernel cache on disk, which need neither a GPU nor PyTorch."""

import os
import subprocess
import sys

import pytest
import sdpa


@pytest.fixture(autouse=True)
def as_before():
    yield
    sdpa.set_kernel_cache(folder="/nowhere/kernels")


def test_a_folder_and_a_limit_are_taken_and_nothing_is_made(tmp_path):
    folder = tmp_path / "kernels"
    sdpa.set_kernel_cache(folder=folder, limit_bytes=1 << 20)
    assert sdpa.kernel_cache() == {"folder": folder, "kernels": 0, "bytes": 0, "limit_bytes": 1 << 20, "refused": None}
    assert sdpa.clear_kernel_cache() == 0 and not folder.exists()
    sdpa.set_kernel_cache(False)
    assert sdpa.kernel_cache() is None


def test_clearing_deletes_kernels_alone(tmp_path):
    sdpa.set_kernel_cache(folder=tmp_path)
    tmp_path.chmod(0o700)
    (tmp_path / "a.record").write_bytes(b"x" * 10)
    (tmp_path / "letter").write_bytes(b"x")
    assert (sdpa.kernel_cache()["kernels"], sdpa.kernel_cache()["bytes"]) == (1, 10)
    assert sdpa.clear_kernel_cache() == 1 and os.listdir(tmp_path) == ["letter"]


@pytest.mark.parametrize(
    "arguments, told",
    [
        (dict(on=1), "on: got 1"),
        (dict(on=False, folder="/x"), "True with a folder or a limit"),
        (dict(folder="relative"), "an absolute path"),
        (dict(limit_bytes=-1), "an integer from 0 to 2^63 - 1"),
        (dict(limit_bytes=True), "an integer from 0 to 2^63 - 1"),
        (dict(limit_bytes=1.5), "an integer from 0 to 2^63 - 1"),
    ],
)
def test_wrong_settings_are_told(arguments, told):
    with pytest.raises(sdpa.SpecError) as error:
        sdpa.set_kernel_cache(**arguments)
    assert told in str(error.value)


@pytest.mark.parametrize(
    "variables, told",
    [
        ({"SDPA_CACHE": "off"}, "None"),
        ({"SDPA_CACHE_DIR": "/x"}, "/x/kernels"),
        ({"XDG_CACHE_HOME": "/y"}, "/y/sdpa/kernels"),
        ({"SDPA_CACHE": "0"}, "SDPA_CACHE"),
        ({"SDPA_CACHE_DIR": "x"}, "an absolute path"),
    ],
)
def test_variables_say_where_it_is(variables, told):
    text = "import sdpa\ntry:\n    facts = sdpa.kernel_cache()\n    print(facts and facts['folder'])\nexcept sdpa.SpecError as e:\n    print(e)"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("SDPA_CACHE")}
    said = subprocess.run([sys.executable, "-c", text], env=plain | variables, capture_output=True, text=True, check=True).stdout
    assert told in said
