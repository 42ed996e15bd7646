"""Runs `fastguard try` on three scripts with planted faults, and says what its first line advises.

`python -m benchmarks.trying [--steps 200] [--only NAME]`. EXPECTED was written before the first run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
# Script and fault, with the arms that are right as the first advice; "" if no advice is right.
# "permuted" means the remark that the targets do not follow from the inputs.
EXPECTED = {
    ("classify", ""): (),
    ("classify", "lr low"): ("lr x10",),
    ("classify", "lr high"): ("lr x0.1",),
    ("classify", "decay"): ("no weight decay",),
    ("classify", "eps"): ("default settings", "lr x10"),
    ("classify", "clipped"): ("max_norm x10", "lr x10"),
    ("classify", "softmax"): ("no final activation",),
    ("classify", "init"): ("default initialization",),
    ("classify", "raw inputs"): ("inputs standardized",),
    ("classify", "no zero_grad"): ("gradients cleared", "lr x0.1"),
    ("classify", "dropout"): ("no dropout",),
    ("classify", "sorted"): ("batches shuffled",),
    ("classify", "shuffled"): ("permuted",),
    ("regress", ""): (),
    ("regress", "lr low"): ("lr x10",),
    ("regress", "lr high"): ("lr x0.1",),
    ("regress", "large targets"): ("targets standardized",),
    ("regress", "shuffled"): ("permuted",),
    ("language", ""): (),
    ("language", "lr low"): ("lr x10",),
    ("language", "lr high"): ("lr x0.1",),
    ("language", "shuffled"): ("permuted",),
    # Written, and expected, after what the first set had shown was mended.
    ("vision", ""): (),
    ("vision", "lr low"): ("lr x10",),
    ("vision", "lr high"): ("lr x0.1",),
    ("vision", "decay"): ("no weight decay",),
    ("vision", "momentum"): ("lr x0.1",),
    ("vision", "softmax"): ("no final activation", "lr x10"),
    ("vision", "shuffled"): ("permuted",),
    ("several", ""): (),
    ("several", "raw inputs"): ("inputs standardized",),
    ("several", "init"): ("default initialization",),
    ("several", "sigmoid"): ("no final activation",),
    ("several", "betas"): ("default settings", "lr x0.1"),
    ("several", "no zero_grad"): ("gradients cleared", "lr x0.1"),
}
FIRST = ("classify", "regress", "language")


def main() -> None:
    """Prints a line for each case, and the counts; writes all to --save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", default=(), metavar="SCRIPT/FAULT")
    parser.add_argument("--set", choices=("first", "second", "all"), default="all")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    results = []
    for (script, fault), expected in EXPECTED.items():
        is_in_set = arguments.set == "all" or (script in FIRST) == (arguments.set == "first")
        if not is_in_set or (arguments.only and f"{script}/{fault}" not in arguments.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{script}.py")
            path.write_bytes((HERE / path.name).read_bytes())
            command = [sys.executable, "-m", "fastguard", "try", "--steps", str(arguments.steps), "--json", path.name]
            started = time.monotonic()
            done = subprocess.run([*command, "--fault", fault], cwd=folder, capture_output=True, text=True, check=False)
            told = (
                json.loads(done.stdout) if done.returncode in (0, 1) else {"advice": None, "error": done.stderr[-500:]}
            )
        advised = "permuted" if told.get("targets_do_not_follow") else told["advice"]
        is_right = advised in expected if expected else advised != "permuted"
        results.append({"script": script, "fault": fault, "expected": expected, "right": is_right, **told})
        results[-1]["seconds"] = round(time.monotonic() - started, 1)
        print(f"{script}/{fault or 'sound'}: {advised} ({'right' if is_right else 'WRONG'})", flush=True)
    if arguments.save:
        arguments.save.write_text(json.dumps(results, indent=1))
    faulty = [one for one in results if one["expected"]]
    print(f"{sum(one['right'] for one in faulty)} of {len(faulty)} faults: the first advice is right")


if __name__ == "__main__":
    main()
