"""`import fastguard` is light, its door has what it promises, and all of it needs torch alone: NumPy may be missing."""

import json
import os
import subprocess
import sys

import pytest

import fastguard

# Prints the top-level names of the modules that the code brings in, once what comes before it is there.
PROBE = """
import json, sys
{before}
known = set(sys.modules)
{code}
new = {{name.split(".")[0] for name in set(sys.modules) - known}}
print(json.dumps(sorted(new - set(sys.stdlib_module_names) - {{"fastguard"}})))
"""
EVERYTHING = "import fastguard\nfor name in fastguard.__all__: getattr(fastguard, name)"


def brought_in(code, before="", *, path=None):
    """Packages, other than Python's own and fastguard, that `code` imports in a fresh process after `before`."""
    extra = f"sys.path.insert(0, {path!r})\n" if path else ""
    script = PROBE.format(before=extra + before, code=code)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_alone_brings_in_not_even_torch():
    assert brought_in("import fastguard") == []


@pytest.mark.slow
def test_everything_together_brings_in_nothing_beyond_torch():
    # Tools of torch's that its own lazy imports may pull in are there before; they are torch's needs, not ours.
    assert brought_in(EVERYTHING, before="import torch") == []


@pytest.mark.slow
def test_a_guarded_step_brings_in_nothing_beyond_torch():
    step = (
        "p = torch.nn.Parameter(torch.ones(3))\n{wrap}\np.sum().backward()\no.step()\n"
        "o.state_dict()\nstr(torch.nn.utils.clip_grad_norm_([p], 1.0))"
    )
    plain = "import torch\n" + step.format(wrap="o = torch.optim.AdamW([p])")
    guarded = step.format(wrap="import fastguard\no = fastguard.wrap(torch.optim.AdamW([p]), max_norm=0.1)")
    assert brought_in(guarded + "\nstr(o.guard.report())", before=plain) == []


def test_the_door_is_small_and_older_names_are_one_dot_further():
    assert len(fastguard.__all__) <= 34
    for name in fastguard.__all__:
        assert getattr(fastguard, name) is not None and name in dir(fastguard)
    for name, home in fastguard._OLDER.items():
        assert name not in fastguard.__all__
        assert getattr(fastguard, name) is getattr(getattr(fastguard, home), name)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.slow
def test_every_package_can_be_the_first_that_a_program_imports():
    # Each in a fork of one process that has torch but nothing of fastguard, so that none relies on an earlier import.
    code = """
import importlib, importlib.util, os, pathlib, sys, torch, torch.distributed
folder = pathlib.Path(importlib.util.find_spec("fastguard").origin).parent
for path in sorted(folder.rglob("__init__.py")):
    name = ".".join(path.parent.relative_to(folder.parent).parts)
    if name.startswith("fastguard.kernels.triton"):
        continue
    child = os.fork()
    if not child:
        importlib.import_module(name)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print(name, file=sys.stderr)
        sys.exit(1)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_names_are_unique_and_an_unknown_one_is_an_attribute_error():
    assert len(set(fastguard.__all__)) == len(fastguard.__all__)
    with pytest.raises(AttributeError, match="module 'fastguard' has no attribute 'no_such_name'"):
        fastguard.no_such_name  # noqa: B018


@pytest.mark.parametrize("door", [fastguard, fastguard.tools], ids=lambda door: door.__name__)
def test_the_table_of_homes_matches_what_type_checkers_see(door):
    # A name that is in the lazy table only would be unknown to mypy and to editors, and the other way round.
    import ast
    from pathlib import Path

    tree = ast.parse(Path(door.__file__).read_text(encoding="utf-8"))
    block = next(n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == {name: home.lstrip(".") for name, home in door._HOME.items()}


TRAINING = """
import sys

sys.modules["numpy"] = None  # before torch looks for it
import torch
import fastguard
from fastguard.sinks import read_jsonl

path = sys.argv[1]
shared = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
model = torch.nn.Sequential(shared, shared, torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
batch = torch.randn(8, 4)
assert fastguard.check_initialization(model, batch)["layers"]
optimizer = fastguard.wrap(
    torch.optim.AdamW(model.parameters()),
    model,
    max_norm=1.0,
    activations={"modules": "all", "every": 1, "overhead_budget": None},
    weights=1,
    sinks=[fastguard.JsonlSink(path)],
    check_every=2,
)
for step in range(6):
    loss = model(batch * (torch.inf if step == 4 else 1.0)).square().mean()
    loss.backward()
    model(batch[:4]).sum().backward()  # a second pass in the same step
    optimizer.step()
    optimizer.zero_grad()
    optimizer.guard.observe(loss=loss)
last = optimizer.guard.last
assert last.activations and last.weights
print(optimizer.guard.report(), optimizer.guard.activations.diagnose())
optimizer.guard.close()
kept = fastguard.Checkpoints(path + ".checkpoints")
kept.save(optimizer, 6, metric=1.0)
assert kept.load(optimizer) == 6
history = fastguard.TrainingHistory.from_jsonl(path)
assert history.num_steps == 6 and len(read_jsonl(path)) == 6
debugger = fastguard.TrainingDebugger()
debugger.step(0, 1.0, [torch.ones(3)], 1e-3, activations={"a": torch.zeros(3)})
debugger.report()
clipped, norm = fastguard.clip_gradients([torch.ones(4)], 1.0)
assert float(norm) == 2.0
fastguard.activation_stats(batch)
fastguard.detect_dead_neurons(batch)
fastguard.LearningRateFinder(num_steps=12).range_test(lambda lr: 1.0 / (1.0 + lr))
assert "numpy" not in sys.modules or sys.modules["numpy"] is None
print("done")
"""


@pytest.mark.slow
def test_everything_works_without_numpy(tmp_path):
    command = [sys.executable, "-c", TRAINING, str(tmp_path / "run.jsonl")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), done.stderr[-3000:]
