"""`fastguard run`: any training script, unmodified, with every optimizer guarded.

The script is `__main__`, as under `python script.py`. torch is not imported before the script imports it: what a
script first sets in the environment would come too late.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import importlib.machinery
import importlib.util
import itertools
import logging
import os
import runpy
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import _env
from .._text import count, shown
from .cli import CommandError, Parser, write_page

_WITH_VALUE = ("--out", "--max-norm")
_MOST_REPORTS = 3  # printed in full
_kept: list[Any] = []  # the module that was __main__, whose globals would be cleared with it


def main(argv: list[str]) -> int:
    """Runs the script; does not return where that exits or raises."""
    parser = Parser(
        "fastguard run",
        "Runs a training script, unmodified, and watches every optimizer in it: gradients, losses, validation losses. "
        "At the end, however it comes, prints the report.",
        "The script's exit code is kept. Under torchrun: torchrun --nproc-per-node 2 -m fastguard run script.py",
    )
    parser.usage = (
        "%(prog)s [-h] [--out DIR] [--protect] [--max-norm X] [--experiments] [--quiet] [--no-page]\n"
        "                     (script.py | -m module) [arguments]"
    )
    parser.add_argument("--out", default="runs", metavar="DIR", help="folder for the runs' folders (default: runs)")
    parser.add_argument("--protect", action="store_true", help="skip steps with NaN or Inf; roll back")
    parser.add_argument("--max-norm", type=float, metavar="X", help="with --protect: clip gradients to this total norm")
    parser.add_argument("--experiments", action="store_true", help="try causes that are not sure, in forked copies")
    parser.add_argument("--quiet", action="store_true", help="print nothing; still write the log and the page")
    parser.add_argument("--no-page", action="store_true", help="write no page")
    at = 0  # the position of the script, or of -m: everything after it is the script's
    while at < len(argv) and argv[at] != "-m" and argv[at].startswith("-"):
        at += 2 if argv[at] in _WITH_VALUE else 1
    options, script = parser.parse_args(argv[:at]), argv[at:]
    if not script:
        parser.error("there is no script. Give one: fastguard run script.py, or -m module")
    if options.max_norm is not None and not options.protect:
        parser.error("--max-norm clips, which needs --protect")
    execute = module_as_main(script[1:]) if script[0] == "-m" else script_as_main(script)
    path = Path(script[0]).resolve()
    name = path.parent.name if path.stem == "__main__" else path.stem
    run = _ScriptRun(Path(options.out).absolute(), script[1] if script[0] == "-m" else name, options)
    _when_imported("torch", run.start)
    atexit.register(run.finish)
    try:
        execute()
        run.has_ended = True
    except SystemExit as end:
        run.has_ended = not end.code
        raise
    except BaseException as error:
        _hide_own_frames(error)
        raise
    return 0


def _fresh_main(arguments: list[str], folder: str) -> types.ModuleType:
    """An empty `__main__`, with `arguments` in sys.argv and modules looked for in `folder` first."""
    sys.argv = list(arguments)
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    _kept.append(sys.modules["__main__"])
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if "__annotations__" in sys.modules["__main__"].__dict__:
        module.__annotations__ = {}
    sys.modules["__main__"] = module
    return module


def module_as_main(arguments: list[str]) -> Callable[[], Any]:
    """`python -m arguments[0]`."""
    if not arguments:
        raise CommandError("-m needs the name of a module")
    _fresh_main(["-m", *arguments[1:]], os.getcwd())  # `runpy` puts the path of the module there
    return lambda: runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]


def script_as_main(arguments: list[str]) -> Callable[[], Any]:
    """`python arguments[0]`: a file, or a folder with a `__main__.py`."""
    path, file = arguments[0], os.path.abspath(arguments[0])
    if os.path.isdir(path):
        _fresh_main(arguments, file)
        return lambda: runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise CommandError(f"can't open the script {shown(path)}: {error.strerror}") from None
    module = _fresh_main(arguments, os.path.dirname(os.path.realpath(path)))
    module.__file__ = file
    module.__loader__ = importlib.machinery.SourceFileLoader("__main__", file)
    module.__dict__["__cached__"] = None

    def execute() -> None:
        exec(compile(source, file, "exec", dont_inherit=True), module.__dict__)

    return execute


def _hide_own_frames(error: BaseException) -> None:
    """Has the traceback of an error that ends the script begin in the script."""
    hook = sys.excepthook
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__") == __name__:
        trace = trace.tb_next

    def show(kind: Any, value: Any, full: Any) -> None:
        if value is error and trace is not None:
            value.__traceback__ = full = trace
        hook(kind, value, full)

    sys.excepthook = show


def _when_imported(name: str, call: Callable[[], None]) -> None:
    """Calls `call` once the module `name` has been imported; at once if it has been."""
    if name in sys.modules:
        call()
        return

    class Finder:
        @staticmethod
        def find_spec(fullname: str, path: Any = None, target: Any = None) -> Any:
            if fullname != name:
                return None
            sys.meta_path.remove(Finder)
            spec = importlib.util.find_spec(fullname)
            if spec is not None and spec.loader is not None:
                execute = spec.loader.exec_module

                def exec_module(module: types.ModuleType) -> None:
                    vars(spec.loader).pop("exec_module")  # for importlib.reload
                    execute(module)
                    call()

                spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, Finder)


class _ScriptRun:
    """One run of a script: the guards in it, their logs, and what is said at the end."""

    def __init__(self, out: Path, name: str, options: Any) -> None:
        self._out, self._name, self._options = out, name or "run", options
        self._folder: Path | None = None
        self._logs: dict[int, Path] = {}  # by the number of the guard
        self.has_ended = False  # whether the script has come to its end
        self._auto: Any = None
        self._process = os.getpid()
        self._is_over = False
        self._problems: dict[str, str] = {}  # what is not watched, and why

    def start(self) -> None:
        """Waits for optimizers. Called once torch has been imported."""
        try:
            from ..experiments.auto import AutoGuard
            from ..step.endings import when_terminated

            log = logging.getLogger("fastguard")  # whose messages are kept out of the script's own logs
            handler = logging.StreamHandler(sys.__stderr__)
            handler.setFormatter(logging.Formatter("fastguard: %(message)s"))
            log.addHandler(handler)
            log.propagate = False
            if self._options.quiet or _env.rank():
                log.setLevel(logging.CRITICAL)
            self._auto = AutoGuard(self.settings, self._made, protects=self._options.protect)
            self._auto.start()
            when_terminated(self.finish)
            self._problems = self._auto.problems
        except Exception as error:
            self._problems["anything"] = f"{type(error).__name__}: {error}"

    def settings(self, index: int) -> dict[str, Any]:
        """The arguments of `wrap` for the guard of that number."""
        settings: dict[str, Any] = {"sinks": self._sinks(index)}
        if self._options.protect:
            settings |= {"max_norm": self._options.max_norm, "recovery": True}
        if self._options.experiments:
            settings["experiments"] = True
        return settings

    def _made(self, guard: Any) -> None:
        """A guard was made, which delivers its last record at exit: `finish` comes before that."""
        atexit.unregister(self.finish)
        atexit.register(self.finish)

    def _sinks(self, index: int) -> list[Any]:
        from ..experiments.auto import is_first_rank
        from ..sinks import JsonlSink

        if not is_first_rank():
            return []
        try:
            if self._folder is None:
                self._folder = _new_folder(self._out, self._name)
            log = self._logs[index] = self._folder / ("run.jsonl" if not index else f"run-{index + 1}.jsonl")
            return [JsonlSink(log)]
        except OSError as error:
            self._problems.setdefault("the log", f"it cannot be written: {error}")
            return []

    def finish(self) -> None:
        """Says how it went, once, and in this process only."""
        if self._is_over or os.getpid() != self._process:
            return
        self._is_over = True
        lines: list[str] = []
        try:
            if self._auto is not None:
                self._auto.finish(has_ended=self.has_ended)
                lines = self._lines()
            elif not self._problems:
                lines = ["the script never imported torch, so there is nothing to report"]
        except BaseException as error:  # also Ctrl-C, which then ends the report
            lines += [f"the report could not be made: {type(error).__name__}: {error}"]
        if not self._options.quiet and not _env.rank():
            lines += [f"not watched: {what}: {why}" for what, why in self._problems.items()]
            written = "log" if self._options.no_page else "log and page"
            lines += [f"{written}: {shown(os.path.relpath(self._folder))}"] if self._folder is not None else []
            text = "\n".join(["", "fastguard run", *lines]).encode("ascii", "backslashreplace").decode()
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
                sys.stdout.flush()
                print(text, file=sys.__stderr__, flush=True)

    def _lines(self) -> list[str]:
        auto = self._auto
        guards = [*auto.guards, *auto.others]
        lines, brief = [], []
        for number, guard in enumerate(guards, 1):
            report = guard.report()
            kind = next((one.get("kind", "") for one in guard.history.model.optimizer_settings), "optimizer")
            name = f"optimizer {number} of {len(guards)}, {kind}: " if len(guards) > 1 else ""
            if number <= _MOST_REPORTS:
                lines += [f"{name}{report}", ""]
            else:
                brief.append(f"{name}{str(report).splitlines()[0]}")
        lines += brief
        if not self._options.no_page:
            for log in self._logs.values():
                if problem := write_page(log, log.with_suffix(".html"), self._name):
                    self._problems.setdefault("the page", problem)
        lines += [f"the script has guarded {count(len(auto.others), 'optimizer')} itself"] if auto.others else []
        if not guards and not self._problems:
            lines.append(
                "no optimizer took a step in this process, so there is nothing to report. Processes that a script "
                "starts are not watched: start them with torchrun."
            )
        skips = auto.losses.num_scaler_skips
        lines += [f"the GradScaler has skipped {count(skips, 'step')}, which no report contains"] if skips else []
        return lines


def _new_folder(out: Path, name: str) -> Path:
    """A new folder for this run: the time of its start is in its name."""
    folder = first = out / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in itertools.count(2):
        try:
            folder.mkdir(parents=True)
            break
        except FileExistsError:
            folder = first.with_name(f"{first.name}-{number}")
    return folder
