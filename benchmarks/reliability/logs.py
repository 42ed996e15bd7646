"""`fastguard diagnose` on broken logs: random bytes, valid logs with a few bytes changed, JSON of any shape.

    python -m benchmarks.reliability.logs --number 10000 --seed 0

Each case goes through the command in this process. It must end in a diagnosis, or with the code 3 and a line that says
why; raise nothing, in a rule neither; and print nothing but printable ASCII. The figures go to
benchmarks/results/reliability-logs.json.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import platform
import random
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fastguard import __version__
from fastguard.commands import cli
from fastguard.commands.diagnose import EXIT_CODES, EXIT_UNREADABLE

RESULTS = Path(__file__).parents[1] / "results" / "reliability-logs.json"
_KEYS = (
    *("step", "time", "loss", "val_loss", "lr", "loss_scale", "clip/coef", "clipped", "skipped", "nonfinite"),
    *(f"grad/{key}" for key in ("norm", "max", "min", "mean", "std", "num_zeros", "num_nans", "num_infs")),
    *("grad/num_elements", "tensors", "activations", "weights", "model", "of_a_newer_version", ""),
)
_FACTS = (
    *("names", "not_in_optimizer", "without_gradient", "zero_lr", "initialization", "dropout", "decay_per_step"),
    *("backward_per_step", "has_scheduler", "initial_lr", "steps_per_epoch", "unheard_of"),
)
_SAMPLE_KEYS = (
    *("mean", "std", "min_val", "max_val", "num_zeros", "num_saturated", "num_nans", "num_infs", "total_elements"),
    *("abs_max", "num_near_zero", "family", "order", "inputs_finite", "num_units", "num_dead_units", "dead_units"),
    *("num_saturated_units", "num_batches", "numel", "norm", "grad_norm", "update_norm"),
    *("num_nonfinite", "name", "unheard_of"),
)
_FAMILIES = ("relu", "gelu", "tanh", "softmax", "attention", "norm", "linear", "block", "other")
_NAMES = ("layers.0.weight", "layers.1.bias", "NaN", "", "\x1b[2J", "\u202eabc", "a\nb", "\ud800", "n" * 3000)
_NUMBERS = (
    *(0, 1, -1, 2, 3.5, -0.0, 1e-300, 5e-324, 1e-8, 1e154, 1e200, -1e200, 1.7976931348623157e308, 2**53, 2**63, 10**30),
    *(10**400, "NaN", "Infinity", "-Infinity", "nan", "-inf"),
)


class Outcome(NamedTuple):
    """What became of one case: exit code, what is wrong with that (empty if nothing), and the log."""

    code: int | None
    wrong: str
    log: bytes


class Logs:
    """Makes random logs, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kinds: dict[str, Callable[[], bytes]] = {
            "random bytes": self._bytes,
            "a valid log": lambda: self._lines(self._valid()),
            "a valid log with bytes changed": self._mutated,
            "a valid log with values changed": self._other_values,
            "JSON of any shape": self._any_json,
            "an odd file": self._odd,
        }

    def make(self, number: int) -> tuple[str, bytes]:
        """The kind and the bytes of case `number`."""
        kind = list(self.kinds)[number % len(self.kinds)]
        return kind, self.kinds[kind]()

    def _bytes(self) -> bytes:
        start = self.random.choice((b"", b"{", b"\0", b"{}\n", b'{"step":0}\n', b"\xef\xbb\xbf", b"\x1f\x8b"))
        return start + self.random.randbytes(self.random.choice((0, 1, 10, 1000, 20_000)))

    def _number(self) -> Any:
        r = self.random
        return r.choice(_NUMBERS) if r.random() < 0.5 else r.lognormvariate(0.0, 3.0) * r.choice((1, 1, 1, -1))

    def _value(self, depth: int = 0) -> Any:
        r = self.random
        kind = r.randrange(9 if depth < 4 else 6)
        if kind < 3:
            return self._number()
        if kind < 6:
            return (None, True, r.choice(_NAMES))[kind - 3]
        if kind == 6:
            return [self._value(depth + 1) for _ in range(r.randrange(10))]
        keys = r.choice((_NAMES, _KEYS, _FACTS, _SAMPLE_KEYS))
        return {r.choice(keys): self._value(depth + 1) for _ in range(r.randrange(10))}

    def _row(self) -> list[Any]:
        r = self.random
        numel = r.choice((0, 1, 8, 1000))
        norm = r.choice((0.0, 1e-160, 1e-8, 1.0, 1e3, 1e160)) * r.random()
        zeros = numel if not norm else r.randrange(numel + 1)
        return [numel, norm * norm, norm, norm, norm / 2, zeros, int(r.random() < 0.05), int(r.random() < 0.05)]

    def _sample(self, kind: str) -> dict[str, Any]:
        r = self.random
        if kind == "weights":
            sample = {"numel": r.randrange(100), "norm": r.random(), "std": r.random(), "abs_max": r.random()}
            return {**sample, "grad_norm": r.random(), "update_norm": r.choice((0.0, 1e-9, 1e-3, 1.0)) * r.random()}
        numel = r.randrange(1, 1000)
        some = dict.fromkeys(("mean", "std", "min_val", "max_val", "abs_max"), r.gauss(0.0, 1.0))
        counts = {key: r.randrange(numel + 1) for key in ("num_zeros", "num_saturated", "num_near_zero")}
        units = {"num_units": 64, "num_dead_units": r.randrange(65), "num_saturated_units": r.randrange(65)}
        bad = {"num_nans": int(r.random() < 0.1), "num_infs": 0, "total_elements": numel}
        return {"family": r.choice(_FAMILIES), "order": r.randrange(4), **some, **counts, **units, **bad}

    def _valid(self) -> list[dict[str, Any]]:
        r = self.random
        names = r.sample(_NAMES, r.randrange(1, 4))
        facts = {"names": names, "without_gradient": names[:1], "dropout": {"drop": r.random()}}
        facts["initialization"] = {name: [r.random(), r.random()] for name in names}
        lines: list[dict[str, Any]] = [{"time": 1.0, "model": facts}] if r.random() < 0.5 else []
        level, loss, trend = (
            r.lognormvariate(0.0, 2.0),
            r.lognormvariate(0.0, 1.0),
            r.choice((0.9, 0.99, 1.0, 1.01, 1.2)),
        )
        for step in range(r.choice((0, 1, 2, 30, 150))):
            loss *= trend
            jump = r.choice((1e3, "Infinity", "NaN", 1e200)) if r.random() < 0.02 else 1.0
            norm = jump if isinstance(jump, str) else level * jump * r.lognormvariate(0.0, 0.3)
            line = {"step": step, "time": 1.0 + step, "loss": loss * r.gauss(1.0, 0.1), "lr": 1e-3 * r.random()}
            line |= {"grad/norm": norm, "clip/coef": r.choice((1.0, 0.5)), "skipped": r.random() < 0.03}
            if r.random() < 0.1:
                line["val_loss"] = loss * r.random() * 2
            if r.random() < 0.1:
                line["tensors"] = {name: self._row() for name in names}
            for kind in ("activations", "weights"):
                if r.random() < 0.1:
                    line[kind] = {name: self._sample(kind) for name in names}
            lines.append(line)
        return lines

    @staticmethod
    def _lines(lines: list[Any]) -> bytes:
        return b"".join(json.dumps(line).encode() + b"\n" for line in lines)

    def _mutated(self) -> bytes:
        r = self.random
        log = bytearray(self._lines(self._valid()))
        for _ in range(r.choice((1, 2, 10, 100)) if log else 0):
            at = r.randrange(len(log) or 1)
            way = r.randrange(5)
            if way == 0:
                log[at : at + 1] = r.randbytes(1)
            elif way == 1:
                del log[at : at + r.choice((1, 5, 200))]
            elif way == 2:
                log[at:at] = r.choice((b"{", b"}", b"[", b'"', b",", b"\n", b"\0" * 50, b"9" * 400, b"\\u", b"e999"))
            elif way == 3:
                log[at:at] = log[r.randrange(len(log) or 1) :][: r.randrange(300)]
            else:
                del log[at:]
        return bytes(log)

    def _other_values(self) -> bytes:
        r = self.random
        lines = self._valid()
        for line in r.sample(lines, min(len(lines), r.choice((1, 3, 150)))):
            target: Any = line
            while True:
                key = r.choice([*target]) if target else r.choice(_KEYS)
                if isinstance(target.get(key), dict) and r.random() < 0.8:
                    target = target[key]
                    continue
                break
            if r.random() < 0.2:
                target.pop(key, None)
            elif r.random() < 0.1:
                target[r.choice((*_KEYS, *_SAMPLE_KEYS, *_FACTS))] = self._value()
            else:
                target[key] = self._number() if r.random() < 0.6 else self._value()
        return self._lines(lines)

    def _any_json(self) -> bytes:
        r = self.random
        lines: list[Any] = []
        for step in range(r.choice((1, 3, 40))):
            line = {r.choice(_KEYS): self._value() for _ in range(r.randrange(8))}
            if r.random() < 0.8:
                line["step"] = step
            lines.append(line if r.random() < 0.98 else self._value())
        return self._lines(lines)

    def _odd(self) -> bytes:
        r = self.random
        whole = self._lines(self._valid())
        depth = r.choice((10, 900, 1020, 5000, 100_000))
        nested = b'{"step":0,"x":' + b"[" * depth + b"]" * depth + b"}\n"
        objects = b'{"step":1,"activations":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}\n"
        return r.choice(
            (
                *(b"", b"\n\n\n", b"\0" * 1000, b"null\n", b"[1, 2]\n", b"{}\n", b"{\n", b'{"step":null}\n', b'"x"\n'),
                *(
                    whole.decode().encode("utf-16"),
                    b"\xef\xbb\xbf" + whole,
                    gzip.compress(whole),
                    whole[: len(whole) // 2],
                ),
                *(whole[r.randrange(len(whole) + 1) :], whole.replace(b"\n", b"\r\n"), whole.replace(b"\n", b"")),
                *(nested, objects, nested + whole, b'{"step":' + b"9" * 5000 + b"}\n", b'{"step":1e999}\n'),
                *(b'{"step":0,"step":1,"loss":1,"loss":NaN}\n', b'{"step":0,"grad/norm":Infinity}\n' + whole),
                b"".join(b'{"step":%d,"loss":%s}\n' % (i, (b"1e200", b"-1e200")[i % 2]) for i in range(60)),
            )
        )


def diagnose(path: Path, options: list[str]) -> tuple[int | None, str]:
    """The exit code of `fastguard diagnose` on the file, and what is wrong with how it ended; empty if nothing is."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code: int | None = cli.main(["diagnose", str(path), *options])
    except BaseException:
        return None, traceback.format_exc()
    said, told = out.getvalue(), err.getvalue()
    if not (said + told).isascii() or not (said + told).replace("\n", "").isprintable():
        return code, f"not printable ASCII: {ascii(said + told)[:300]}"
    if "bug of fastguard" in told or "failed-parts" in said:  # what a rule raises stands in the report
        return code, told
    if code == EXIT_UNREADABLE:
        is_clear = not said and told.splitlines()[-1].startswith("fastguard diagnose: error: ") and len(told) < 5000
        return code, "" if is_clear else f"no clear line: {told[-300:]!r}"
    if code not in EXIT_CODES.values():
        return code, f"exit code {code}"
    if "--json" in options:
        status = json.loads(said, parse_constant=_refuse)["status"]
    else:
        status = said.partition(" after ")[0].lower().replace(" ", "-")
    return code, "" if EXIT_CODES.get(status) == code else f"code {code}, but the report says {said[:100]!r}"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not strict JSON")


def run(number: int, seed: int) -> tuple[dict[str, Any], list[Outcome]]:
    """Tries `number` logs: the figures, and the cases that went wrong."""
    logs = Logs(seed)
    codes: dict[str, Counter[str]] = {kind: Counter() for kind in logs.kinds}
    bad: list[Outcome] = []
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        for i in range(number):
            kind, content = logs.make(i)
            path.write_bytes(content)
            code, wrong = diagnose(path, ["--json"] if i % 5 == 4 else [])
            codes[kind][str(code)] += 1
            if wrong:
                bad.append(Outcome(code, wrong, content))
    figures = {
        "number": number,
        "seed": seed,
        "num_wrong": len(bad),
        "exit_codes": {kind: dict(sorted(counts.items())) for kind, counts in codes.items()},
        "cpu_s": round(time.process_time() - started, 1),
        "fastguard": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    return figures, bad


def main() -> int:
    """Runs the cases of the command line, prints the figures, and saves them; 1 if a case went wrong."""
    parser = argparse.ArgumentParser("python -m benchmarks.reliability.logs", description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=10_000, help="cases (default: 10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for the logs that went wrong")
    parser.add_argument("--dry", action="store_true", help="save no figures")
    arguments = parser.parse_args()
    figures, bad = run(arguments.number, arguments.seed)
    for i, outcome in enumerate(bad):
        if arguments.keep is not None:
            arguments.keep.mkdir(parents=True, exist_ok=True)
            (arguments.keep / f"{i}.jsonl").write_bytes(outcome.log)
        if i < 20:
            print(f"-- code {outcome.code}: {outcome.wrong}")
    print(json.dumps(figures, indent=2))
    if not arguments.dry:
        RESULTS.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
