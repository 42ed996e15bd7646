"""`import fastguard` needs torch only, and so does the rest: a training with everything on, where NumPy is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
    if step == 3:
        print(fastguard.check_gradients(model))
    optimizer.zero_grad()
    optimizer.guard.observe(loss=loss)
last = optimizer.guard.last
assert last.activations and last.weights
optimizer.guard.replay(lambda: model(batch))
print(optimizer.guard.report(), optimizer.guard.activations.table())
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
fastguard.channel_stats(batch), fastguard.activation_stats(batch)
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
