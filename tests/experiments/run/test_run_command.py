"""`fastguard run script.py` behaves as `python script.py` does, and reports at the end, however that comes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from several_processes import slow, torchrun

ROOT = str(Path(__file__).parents[3])

# Prints all that a script can know of how it was started.
ABOUT = """
import atexit, os, signal, sys
if __name__ == "__main__":
    known = sorted(name for name in globals() if name.startswith("__"))
    print(known, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__)
    print(sys.argv, sys.path[0], sys.modules["__main__"].__file__)
    atexit.register(print, "at exit")
def end(how):
    sys.stdout.flush()
    if how == "raise":
        raise ValueError("of the script")
    if how in ("SIGINT", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, how))
    sys.exit({"three": 3, "text": "a message"}.get(how))
"""

TRAINS = """
import multiprocessing, pickle
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Mine:
    pass

def work(queue):
    queue.put((__name__, type(pickle.loads(pickle.dumps(Mine()))).__name__))

def main():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    x = torch.randn(64, 4)
    for method in ("fork", "spawn") if sys.argv[1] == "raise" else ("fork", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        child = context.Process(target=work, args=(queue,))
        child.start()
        print(method, queue.get(), child.join(), child.exitcode)
        for a, b in DataLoader(TensorDataset(x, x[:, :1]), 16, num_workers=1, multiprocessing_context="fork"):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(a), b).backward()
            optimizer.step()
    print(type(pickle.loads(pickle.dumps(Mine()))), model.weight.tolist(), torch.initial_seed())
    end(sys.argv[1])

if __name__ == "__main__":
    main()
"""


def _run(folder, *command, options=()):
    """What a script does under `fastguard run`, or under Python alone if `options` is None."""
    ours = [] if options is None else ["-m", "fastguard", "run", *options]
    known = {**os.environ, "PYTHONPATH": ROOT, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *ours, *command], cwd=folder, env=known, capture_output=True, text=True, timeout=240
    )


@pytest.mark.parametrize("how", ["return", "three", "text", "raise", "SIGINT", "SIGTERM"])
def test_a_script_without_torch_is_run_as_by_python(how, tmp_path):
    (tmp_path / "other").mkdir()
    script = tmp_path / "other" / "script.py"
    script.write_text(ABOUT + "end(sys.argv[2])")
    plain = _run(tmp_path, "other/script.py", "--an=option", how, options=None)
    ours = _run(tmp_path, "other/script.py", "--an=option", how)
    assert (ours.returncode, ours.stdout) == (plain.returncode, plain.stdout)
    said, _, report = ours.stderr.partition("\nfastguard run\n")
    assert said == plain.stderr, "the traceback, too, is Python's"
    assert ("never imported torch" in report) is (how != "SIGTERM")
    assert not (tmp_path / "runs").exists()


def test_a_module_is_run_as_by_python(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "other.py").write_text("name = 'a relative import'")
    (package / "train.py").write_text(ABOUT + "from .other import name\nprint(name)\nend(sys.argv[1])")
    plain = _run(tmp_path, "-m", "package.train", "three", options=None)
    ours = _run(tmp_path, "-m", "package.train", "three", options=("--quiet",))
    assert (ours.returncode, ours.stdout, ours.stderr) == (3, plain.stdout, plain.stderr)
    (package / "__main__.py").write_text("import sys; print(sys.argv, sys.path[0]); import other")
    assert _run(tmp_path, "package", "x").stdout == _run(tmp_path, "package", "x", options=None).stdout


def test_what_cannot_be_run_is_said_in_a_line(tmp_path):
    for arguments, message in (
        (("no.py",), "can't open the script no.py: No such file"),
        ((), "there is no script"),
        (("-m",), "-m needs the name of a module"),
    ):
        ended = _run(tmp_path, *arguments)
        assert ended.returncode == 64 and message in ended.stderr and len(ended.stderr.splitlines()) == 1
    ended = _run(tmp_path, "no.py", options=("--max-norm", "1"))
    assert ended.returncode == 64 and "--protect" in ended.stderr


@pytest.mark.slow
def test_a_training_is_run_as_by_python_and_reported(tmp_path):
    (tmp_path / "train.py").write_text(ABOUT + TRAINS)
    plain = _run(tmp_path, "train.py", "raise", options=None)
    ours = _run(tmp_path, "train.py", "raise")
    assert (ours.returncode, ours.stdout) == (1, plain.stdout)
    said, _, report = ours.stderr.partition("\nfastguard run\n")
    assert said == plain.stderr
    assert re.match(r"[A-Z]+ after 8 steps", report) and "not watched" not in report
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"log and page: runs/{folder.name}" in report
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "step" in line] == list(range(8))
    assert all("loss" in line for line in lines if "step" in line)
    if "plotly" in sys.modules or "needs plotly" not in report:
        assert "train" in (folder / "run.html").read_text()


DISTRIBUTED = """
import os, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(12):
    x = torch.randn(8, 4)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x[:, :1]).backward()
    optimizer.step()
print("rank", dist.get_rank(), "guarded", "guard" in dir(optimizer) and optimizer.guard.last.step, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("none", [pytest.param(None, marks=slow)])
def test_under_torchrun_every_rank_guards_and_the_first_reports(none, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DISTRIBUTED)
    said = torchrun(2, "-m", "fastguard", "run", "--no-page", "--out", str(tmp_path / "runs"), str(script))
    assert said.count("guarded 11") == 2
    assert said.count("fastguard run") == 1 and "after 12 steps" in said
    assert len(list((tmp_path / "runs").glob("*/*.jsonl"))) == 1


def _framework(tmp_path, name, script, steps):
    pytest.importorskip(name, reason=f"{name} is not installed")
    (tmp_path / "train.py").write_text(script)
    ended = _run(tmp_path, "train.py", options=("--no-page",))
    assert ended.returncode == 0, ended.stderr
    assert f"after {steps} steps" in ended.stderr, ended.stderr
    (log,) = (tmp_path / "runs").glob("*/run.jsonl")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    expected = json.loads(ended.stdout.splitlines()[-1])
    assert [line["loss"] for line in lines if "step" in line] == pytest.approx(expected, rel=1e-4)
    return {line["step"]: line["val_loss"] for line in lines if "val_loss" in line}


DATA = """
import json, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 4)
loader = DataLoader(TensorDataset(x, x[:, :1]), 8)
losses = []
"""


LIGHTNING = """
import lightning.pytorch as L

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
L.Trainer(max_epochs=2, accelerator="cpu", accumulate_grad_batches=2, **quiet).fit(Lit(), loader, loader)
print(json.dumps([(a + b) / 2 for a, b in zip(losses[::2], losses[1::2])]))
"""

TRANSFORMERS = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=30, n_positions=16))
tokens = torch.randint(0, 30, (32, 12))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=4, logging_steps=1, use_cpu=True,
    report_to=[], save_strategy="no", eval_strategy="steps", eval_steps=2, disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
trainer.train()
print(json.dumps([line["loss"] for line in trainer.state.log_history if "loss" in line]))
"""


def test_lightning(tmp_path):
    assert list(_framework(tmp_path, "lightning", DATA + LIGHTNING, 8)) == [3, 7]


def test_transformers(tmp_path):
    assert list(_framework(tmp_path, "transformers", DATA + TRANSFORMERS, 4)) == [1, 3]
