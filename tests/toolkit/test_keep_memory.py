"""`keep_memory`: freed memory stays in the process, results stay the same, and `restore` undoes it."""

import os
import subprocess
import sys

import pytest

from fastguard.observers.resources import malloc_library, uses_glibc_malloc
from fastguard.tools import allocator, keep_memory

needs_glibc = pytest.mark.skipif(not uses_glibc_malloc(), reason=f"malloc is {malloc_library() or 'not known'} here")

FAULTS = """
import resource, torch
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(12_000_000)  # 46 MiB: above what glibc keeps by itself
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5
"""


def run_python(code, **environment):
    """The words that a fresh process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@needs_glibc
def test_faults_end_and_come_back():
    code = FAULTS + (
        "import fastguard\n"
        "before = faults(); kept = fastguard.tools.keep_memory(); [faults() for _ in range(5)]; during = faults()\n"
        "active = kept.is_active; kept.restore()\n"
        "print(before, during, faults(), active, kept.is_active)"
    )
    before, during, after, was_active, is_active = run_python(code)
    assert float(before) > 1000 and float(during) < 50 and float(after) > 1000
    assert (was_active, is_active) == ("True", "False")


@needs_glibc
@pytest.mark.slow
@pytest.mark.parametrize(("value", "is_kept"), [("1", True), ("0", False), ("", False)])
def test_the_environment_asks_for_it(value, is_kept):
    code = "import fastguard\n" + FAULTS + "[faults() for _ in range(5)]; print(faults())"
    (faults,) = run_python(code, FASTGUARD_KEEP_MEMORY=value)
    assert (float(faults) < 50) == is_kept


@needs_glibc
def test_a_second_call_gives_the_first_ones_handle():
    kept = keep_memory()
    try:
        assert kept.is_active and keep_memory() is kept and "M_MMAP_MAX=0" in repr(kept)
    finally:
        kept.restore()
    message = kept.message
    kept.restore()
    assert not kept.is_active and kept.message == message and "restored" in message
    again = keep_memory()
    again.restore()
    assert again is not kept


@pytest.mark.parametrize(
    "library", ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2", "ld-musl-x86_64.so.1", ""]
)
def test_other_allocators_are_left_alone(library, monkeypatch):
    monkeypatch.setattr(allocator, "uses_glibc_malloc", lambda: False)
    monkeypatch.setattr(allocator, "malloc_library", lambda: library)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: pytest.fail("libc was called"))
    kept = keep_memory()
    assert not kept.is_active and "nothing was done" in kept.message and (library or sys.platform) in kept.message
    kept.restore()
