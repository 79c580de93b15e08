import platform
import subprocess
import sys

import pytest

from fdc_jax import host_memory

# Touches 64 MiB in two threads, frees them, and counts the pages that doing it again takes.
_SCRIPT = """
import resource, sys, threading
from fdc_jax import host_memory

kept = sys.argv[1] == "keep" and host_memory.keep_freed_memory()
def touch():
    b"x" * 2**26
def in_a_thread():
    thread = threading.Thread(target=touch)
    thread.start()
    thread.join()
in_a_thread()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
in_a_thread()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(mode: str) -> tuple[bool, int]:
    command = [sys.executable, "-c", _SCRIPT, mode]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return output[0] == "True", int(output[1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again():
    kept, faults = _faults("keep")
    if not kept:
        pytest.skip("an accelerator's plugin is installed")
    left, faults_otherwise = _faults("leave")
    assert not left
    assert faults < 1000 < faults_otherwise


def test_nothing_is_changed_beside_an_accelerator(monkeypatch):
    monkeypatch.setattr(host_memory.importlib.metadata, "entry_points", lambda group: (group,))
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: pytest.fail("called"))
    assert not host_memory.keep_freed_memory()
