"""The kernels from several Python threads at once, under the thread sanitizer: reports of ours, and wrong figures.

    python -m benchmarks.reliability.threads                # builds, runs, saves results/reliability-threads.json
    python -m benchmarks.reliability.threads --rounds 5 --dry

Linux and GCC. Python, torch and libgomp are not instrumented: the extension is built without OpenMP, and a report
counts as ours if a frame of either thread is in it. Large tensors, for which the kernels give up the GIL, and small
ones; each thread has its own, and all read the same ones.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import fastguard
from fastguard.kernels import cpu, run_activation, scale_, tensor_stats
from fastguard.records.slot import HEADER_BYTES

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "reliability-threads.json"
NUM_THREADS = 4


def _tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    large = make(300, 700)
    return [large.float(), large.bfloat16(), large[:, ::2], make(1000).half(), make(70_001) * 1e200, make(5).float()]


def _figures(tensors: list[torch.Tensor]) -> list[Any]:
    """All that is only read, as figures that compare."""
    stats = tensor_stats(tensors)
    line = cpu.json_line(bytearray(HEADER_BYTES), 0, bytearray(stats.table.tobytes()), 0.0)  # type: ignore[misc]
    channels = [run_activation(tensors[0], (-0.99, 0.99, 1e-6), dim, "auto") for dim in (0, 1)]
    return [
        stats,
        stats.total_row(),
        line,
        [fastguard.activation_stats(t) for t in tensors],
        channels,
    ]


def _write(seed: int) -> list[torch.Tensor]:
    """What writes, on tensors of its own: scaling, the drop-in, and a whole step."""
    own = _tensors(seed)
    scale_(own, 0.5)
    parameters = [torch.nn.Parameter(torch.zeros_like(t)) for t in own]
    for parameter, tensor in zip(parameters, own, strict=True):
        parameter.grad = tensor
    fastguard.clip_grad_norm_(parameters[:4], 0.1)
    found: list[Any] = [None] * 6
    headers = bytearray(HEADER_BYTES)
    cpu.take_step([{"params": parameters, "lr": 0.1}], headers, 0, found, 0, 1, 1e-3, True, True)  # type: ignore[misc]
    return own


def work(rounds: int) -> int:
    """Runs the threads; how many of their results differ from those of one thread."""
    torch.set_num_threads(1)
    shared = _tensors(0)
    expected = repr(_figures(shared))
    written = [[t.clone() for t in _write(seed)] for seed in range(NUM_THREADS)]
    wrong: list[str] = []
    start = threading.Barrier(NUM_THREADS)

    def run(number: int) -> None:
        start.wait()
        try:
            for _ in range(rounds):
                if repr(_figures(shared)) != expected:
                    wrong.append("what was read")
                if not all(map(torch.equal, _write(number), written[number])):
                    wrong.append("what was written")
        except Exception as error:  # of a thread, which would end in silence
            wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for what in wrong[:20]:
        print(what, file=sys.stderr)
    return len(wrong)


def race() -> int:
    """Two threads that write to one tensor: what the sanitizer must see, or it sees nothing."""
    tensor = torch.ones(200_000)
    threads = [threading.Thread(target=lambda: [scale_([tensor], 0.5) for _ in range(20)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0


def reports(folder: Path, name: str = "report") -> tuple[int, int]:
    """How many reports there are in the sanitizer's files, and how many of them name the extension."""
    found = [text for path in folder.glob(f"{name}.*") for text in path.read_text(errors="replace").split("=" * 18)]
    found = [text for text in found if "WARNING: ThreadSanitizer" in text]
    ours = [text for text in found if re.search(r"fastguard::|\b_C\.[\w-]+\.so", text)]
    return len(found), len(ours)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="of each thread (default: 50)")
    parser.add_argument("--dry", action="store_true", help="save nothing")
    parser.add_argument("--work", action="store_true", help="run the threads in this process, and nothing else")
    parser.add_argument("--race", action="store_true", help="race in this process, and nothing else")
    arguments = parser.parse_args(argv)
    if arguments.race:
        return race()
    if arguments.work:
        return int(work(arguments.rounds) > 0)
    started = time.perf_counter()
    done = subprocess.run([ROOT / ".ci" / "sanitize", "thread", "--rounds", str(arguments.rounds)], check=False)
    folder = ROOT / "build" / "sanitize-thread"
    num_reports, num_ours = reports(folder)
    if not reports(folder, "race")[1]:
        print("the sanitizer did not see a race that there was", file=sys.stderr)
        return 1
    results = {
        "number": NUM_THREADS * arguments.rounds,
        "num_wrong": int(done.returncode != 0),
        "num_reported": num_ours,
        "num_threads": NUM_THREADS,
        "num_reports_of_others": num_reports - num_ours,
        "wall_s": round(time.perf_counter() - started, 1),
        "fastguard": fastguard.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    print(json.dumps(results, indent=2))
    if not arguments.dry:
        RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(bool(results["num_wrong"] or num_ours))


if __name__ == "__main__":
    sys.exit(main())
