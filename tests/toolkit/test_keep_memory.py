"""`keep_memory`: freed memory stays in the process, results stay the same, and `restore` undoes it."""

from __future__ import annotations

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


def run_python(code: str, **environment: str) -> list[str]:
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
def test_it_needs_no_torch():
    code = "import sys\nfrom fastguard.tools import keep_memory\nprint(keep_memory().is_active, 'torch' in sys.modules)"
    assert run_python(code) == ["True", "False"]


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


def test_an_allocator_that_is_loaded_first_is_seen(tmp_path):
    """A library with a malloc of its own, as LD_PRELOAD brings jemalloc in."""
    compiler = next(
        (c for c in ("cc", "gcc", "clang") if subprocess.run(["which", c], capture_output=True).returncode == 0), None
    )
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("needs a C compiler and LD_PRELOAD")
    source, library = tmp_path / "own.c", tmp_path / "libown.so"
    source.write_text(
        "#include <stddef.h>\nvoid *__libc_malloc(size_t);\nvoid *malloc(size_t n) { return __libc_malloc(n); }\n"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    code = "from fastguard.tools import keep_memory\nprint(keep_memory().message)"
    assert "(libown.so)" in run_python(code, LD_PRELOAD=str(library))


@needs_glibc
@pytest.mark.slow
def test_losses_are_the_same_to_the_last_bit():
    code = (
        "import sys, torch, fastguard\n"
        "if sys.argv[1:] == ['keep']: fastguard.tools.keep_memory()\n"
        "torch.manual_seed(0)\n"
        "parts = torch.nn.Embedding(4_000, 64), torch.nn.Flatten(), torch.nn.Linear(512, 4_000)\n"
        "model = torch.nn.Sequential(*parts)\n"
        "optimizer = fastguard.wrap(torch.optim.AdamW(model.parameters(), fused=True), model, max_norm=0.1)\n"
        "for _ in range(12):\n"
        "    loss = torch.nn.functional.cross_entropy(model(torch.randint(4_000, (16, 8))), torch.arange(16))\n"
        "    optimizer.zero_grad(); loss.backward(); optimizer.step(); print(loss.item().hex())\n"
    )
    plain = run_python(code)
    kept = subprocess.run([sys.executable, "-c", code, "keep"], capture_output=True, text=True, check=True).stdout
    assert plain == kept.split() and len(set(plain)) == 12
