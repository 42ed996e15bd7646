"""`fastguard info`: versions, every backend with whether it runs and why not, and the settings in effect."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
from typing import Any

from .. import __version__, _env
from .._text import count, shown
from ..errors import FastguardError
from .cli import EXIT_FAILED, Parser

# What extras of fastguard use, and what for.
OPTIONAL = {
    "plotly": "figures, and the page of a run",
    "triton": "GPU kernels",
    "PyYAML": "fastguard.settings of a YAML file",
    "orjson": "faster log reading",
    "tensorboard": "TensorBoardSink",
    "wandb": "WandbSink",
    "mlflow-skinny": "MlflowSink; mlflow does as well",
    "trackio": "TrackioSink",
    "prometheus-client": "PrometheusSink",
    "numpy": "benchmark baseline",
}


def collect() -> dict[str, Any]:
    """What `fastguard info` shows, as plain types.

    `backends` is in the order in which "auto" tries them. `problem` is None, or the line that says why no backend could
    be loaded at all: torch cannot be imported, or an environment variable asks for what is not there.
    """
    facts: dict[str, Any] = {"torch": None, "backends": {}, "problem": None, "environment": _env.in_effect()}
    try:
        import torch
    except ImportError as error:
        return {**facts, "problem": f"torch cannot be imported: {error}"}
    cuda = torch.version.cuda
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    built = f"CUDA {cuda}, {', '.join(gpus) or 'no GPU in reach'}" if cuda else "built without CUDA"
    facts |= {"torch": torch.__version__, "build": f"{count(torch.get_num_threads(), 'thread')}, {built}"}
    try:
        from .. import kernels  # which cannot even be imported for an instruction set that is not there

        facts["backends"] = {name: status._asdict() for name, status in kernels.backends().items()}
        kernels.resolve_backend("auto")
    except (FastguardError, ValueError) as error:
        facts["problem"] = str(error)
    return facts


def describe(facts: dict[str, Any]) -> str:
    """`facts`, which `collect` gave, for a person."""
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"
    lines = [f"fastguard   {__version__}", f"Python      {python}, {machine}"]
    lines += [f"torch       {facts['torch']}, {facts['build']}"] if facts["torch"] else []
    lines += ["", 'backends, in the order in which "auto" tries them (triton after a trial on the GPU)']
    for name, status in facts["backends"].items():
        verdict = f"runs        {status['detail']}" if status["available"] else f"cannot run  {status['reason']}"
        lines.append(f"  {name:<12}{verdict}")
    lines += [] if facts["backends"] else ["  none could be loaded"]
    lines += [f"  problem: {facts['problem']}"] if facts["problem"] else []
    lines += ["", "environment"]
    for name, setting in facts["environment"].items():
        value = "not set" if setting["value"] is None else repr(setting["value"])
        lines.append(f"  {name:<24}{value:<10}{setting['meaning']}")
    lines += ["", "optional packages"]
    for name, use in OPTIONAL.items():
        version = "none"
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(name)
        lines.append(f"  {name:<24}{version:<10}{use}")
    return "\n".join(map(shown, lines))


def main(argv: list[str]) -> int:
    """Prints the facts; 1 if no backend could be loaded or the one that the environment asks for cannot run."""
    parser = Parser("fastguard info", "Prints versions, which backends work here and why others do not, and settings.")
    parser.parse_args(argv)
    facts = collect()
    print(describe(facts))
    return EXIT_FAILED if facts["problem"] else 0
