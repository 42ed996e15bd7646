"""Runs a script as several processes: `SCRIPT RANK WORLD FOLDER`. The last line that each prints is JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

HAS_GLOO = dist.is_available() and dist.is_gloo_available()
slow = [pytest.mark.slow, pytest.mark.skipif(not HAS_GLOO, reason="this torch has no gloo")]


def start(script, world, folder):
    """The script as `world` processes."""
    tests = Path(__file__).parent
    folders = [str(tests.parent), str(tests), str(script.parent)]
    code = f"import sys, runpy; sys.path[:0] = {folders!r}; sys.argv[0] = {str(script)!r}; "
    code += f"runpy.run_path({str(script)!r}, run_name='__main__')"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    commands = [[sys.executable, "-c", code, str(rank), str(world), str(folder)] for rank in range(world)]
    return [subprocess.Popen(command, **pipes) for command in commands]


def torchrun(world, *options, **environment):
    """What a script in `options` printed under torchrun, errors too; it must end without one."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), *options]
    known = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1", **environment}
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=known, timeout=240)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def run(script, world, folder, timeout=300):
    """What each of `world` processes printed last."""
    started = start(script, world, folder)
    try:
        said = [process.communicate(timeout=timeout) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert [process.returncode for process in started] == [0] * world, said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]
