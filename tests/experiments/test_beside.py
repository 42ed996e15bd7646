"""Experiments beside a training: what they find, and that the training does not notice."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading

import pytest
import torch

import fastguard
from fastguard.diagnosis import find_causes
from fastguard.diagnosis.finding import Finding
from fastguard.experiments import ARMS, Experiments, compare, forked
from fastguard.experiments.beside import as_note
from fastguard.experiments.forked import landlock_version

# A training that reads a file line by line, draws from all generators, writes a log and checkpoints.
SCRIPT = """
import hashlib, json, os, random, sys
import numpy, torch
import fastguard
from fastguard.experiments import Experiments
from torch.utils.data import DataLoader, TensorDataset

folder, is_shuffled, experiments = sys.argv[1], sys.argv[2] == "shuffled", sys.argv[3] == "experiments"
random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
x = torch.randn(3200, 10)
y = (x @ torch.randn(10, 3)).argmax(1)
y = y[torch.randperm(3200)] if is_shuffled else y
with open(f"{folder}/data.txt", "w") as file:
    file.write("".join(f"{i}\\n" for i in range(5000)))
data, log = open(f"{folder}/data.txt"), open(f"{folder}/log.txt", "w", buffering=1)
loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.Dropout(0.1), torch.nn.ReLU(), torch.nn.Linear(32, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
settings = Experiments(num_steps=24, first=10, ahead_s=100.0) if experiments else None
sink = fastguard.sinks.JsonlSink(f"{folder}/run.jsonl")
fastguard.wrap(optimizer, model, sinks=[sink], experiments=settings)
seen = hashlib.sha256()
for xb, yb in loader:
    loss = torch.nn.functional.cross_entropy(model(xb), yb)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    optimizer.guard.observe(loss=loss)
    line = f"{loss.item()} {data.readline().strip()} {random.random()} {numpy.random.rand()}"
    log.write(line + "\\n")
    torch.save(model.state_dict(), f"{folder}/checkpoint.pt")
    print(line)
log.close()
for tensor in [*model.state_dict().values(), *optimizer.state[model[0].weight].values(), torch.get_rng_state()]:
    seen.update(tensor.numpy().tobytes())
for name in ("log.txt", "checkpoint.pt"):
    seen.update(open(f"{folder}/{name}", "rb").read())
optimizer.guard.close()
print(json.dumps({"bits": seen.hexdigest(), "experiments": optimizer.guard.history.model.experiments}))
"""


def train(folder, kind, what):
    folder.mkdir()
    command = [sys.executable, "-c", SCRIPT, str(folder), kind, what]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 101 and not done.stderr  # the copies print nothing
    return json.loads(lines[-1])


@pytest.mark.slow
@pytest.mark.skipif(not landlock_version(), reason="the kernel has no Landlock")
def test_copies_find_out_and_the_training_stays_the_same_to_the_bit(tmp_path):
    plain, tried = (train(tmp_path / what, "sound", what) for what in ("plain", "experiments"))
    assert plain["bits"] == tried["bits"] and plain["experiments"] == []
    (note,) = tried["experiments"]
    assert (note["arm"], note["verdict"], note["step"], note["num_steps"]) == ("inputs permuted", "harms", 10, 24)
    assert note["t"] < -3.0 and note["ratio"] == 0.2
    history = fastguard.TrainingHistory.from_jsonl(tmp_path / "experiments" / "run.jsonl")
    assert history.num_steps == 100 and list(history.model.experiments) == [note]


def test_a_process_that_is_not_alone_is_not_forked(monkeypatch):
    monkeypatch.setattr(forked, "_shares_memory", lambda: False)  # another test may have left some
    p = torch.nn.Parameter(torch.ones(2))
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="reader", daemon=True)
    thread.start()
    assert "reader" in (forked.why_not([p]) or "")
    stop.set()
    thread.join()
    child = multiprocessing.get_context("fork").Process(target=stop.wait, daemon=True)
    child.start()
    child.join(0.0)
    p.detach().share_memory_()
    assert "shares memory" in (forked.why_not([p]) or "") or "other processes" in (forked.why_not([p]) or "")
    child.join()
    assert "shares memory" in (forked.why_not([p]) or "")
    assert forked.why_not([torch.ones(2, device="meta")]) == "the process uses a GPU"


def batches():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 16, 10, generator=generator)
    return [(one, (one @ torch.arange(30.0).view(10, 3).sin()).argmax(1)) for one in x]


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(experiments, lr=1e-2):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(), torch.nn.ReLU())
    model.append(torch.nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    fastguard.wrap(optimizer, model, max_norm=1.0, experiments=experiments)
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.guard.observe(loss=loss)
    return [*model.state_dict().values(), torch.rand(3)], optimizer.guard


def test_experiments_on_copies_leave_model_and_generators_alone(monkeypatch):
    monkeypatch.setattr(forked, "why_not", lambda tensors: "it must not")
    plain, _ = trained(None)
    tried, guard = trained(Experiments(first=20, ahead_s=100.0, loss_fn=loss_of, batches=batches))
    assert all(map(torch.equal, plain, tried))
    (note,) = guard.history.model.experiments
    assert (note["arm"], note["verdict"], note["step"], note["num_steps"]) == ("inputs permuted", "harms", 20, 40)
    assert guard.history.num_steps == 39  # and the newest: those of the copies are not among them


def test_without_a_way_to_experiment_it_says_why_once(monkeypatch, caplog):
    monkeypatch.setattr(forked, "why_not", lambda tensors: "it must not")
    trained(Experiments(first=5, num_steps=16))
    assert [one.getMessage() for one in caplog.records] == ["no experiment at step 5: it must not (see fastguard try)"]


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="`num_steps` must be at least 16, got 3"):
        Experiments(num_steps=3)
    with pytest.raises(ValueError, match="given together"):
        Experiments(loss_fn=loss_of)
    with pytest.raises(TypeError, match="`experiments` must be True"):
        trained(7)


def test_a_result_multiplies_the_odds_of_its_cause_and_is_told():
    finding = Finding("The weights hardly move.", rule="learning-rate-unusual", evidence={"is_high": False})
    confidences = {}
    for verdict, losses in (("none", None), ("helps", [1.0, 1.1] * 20), ("harms", [3.0, 3.1] * 20)):
        history = fastguard.TrainingHistory()
        if losses is not None:
            note = as_note(ARMS["lr x10"], compare([2.0, 2.1] * 20, losses), 30)
            assert note["verdict"] == verdict
            history.note_model(experiments=[note])
            saved, history = history.state_dict(), fastguard.TrainingHistory()
            history.load_state_dict(saved)
        (cause,) = find_causes([finding], history)
        assert cause.rule == "learning-rate-too-low"
        assert ("Tried: with the learning rate times 10 the loss is 1 " in cause.summary) is (losses is not None)
        confidences[verdict] = cause.confidence
    assert confidences["helps"] > confidences["none"] > confidences["harms"]
    odds = {name: one / (1.0 - one) for name, one in confidences.items()}
    assert odds["helps"] == pytest.approx(4.0 * odds["none"])


CONFINED = """
import os, sys
from fastguard.experiments import forked
room, outside = sys.argv[1:]
forked.refuse_writes([room, "/dev"])
refused = 0
for change in (
    lambda: open(outside, "w"),
    lambda: os.truncate(outside, 0),
    lambda: os.remove(outside),
    lambda: os.rename(outside, outside + "2"),
    lambda: os.mkdir(outside + "3"),
    lambda: os.symlink("x", outside + "4"),
):
    try:
        change()
    except PermissionError:
        refused += 1
with open(os.path.join(room, "a"), "w") as file:
    file.write("x")
os.rename(os.path.join(room, "a"), os.path.join(room, "b"))
os.system(f"echo x > {outside}; echo x > /dev/null")
print(refused, open(outside).read())
"""


@pytest.mark.skipif(not forked.landlock_version(), reason="the kernel has no Landlock")
def test_landlock_refuses_all_changes_outside_of_the_allowed_folders(tmp_path):
    room, outside = tmp_path / "room", tmp_path / "precious"
    room.mkdir()
    outside.write_text("kept")
    done = subprocess.run(
        [sys.executable, "-c", CONFINED, str(room), str(outside)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["6", "kept"]
    assert sorted(os.listdir(tmp_path)) == ["precious", "room"] and os.listdir(room) == ["b"]


def test_without_landlock_it_says_so(monkeypatch):
    monkeypatch.setattr(forked, "landlock_version", lambda: 0)
    with pytest.raises(OSError, match=r"no Landlock \(Linux 5.13 or later\)"):
        forked.refuse_writes()


def test_a_mirror_has_copies_of_small_files_and_links_to_the_rest(tmp_path, monkeypatch):
    folder, copy = tmp_path / "project", tmp_path / "project" / "room" / "copy"
    (folder / "src" / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    copy.parent.mkdir()
    (folder / "src" / "deep" / "train.py").write_text("small")
    (folder / "weights.bin").write_bytes(b"x" * 100)
    (folder / "link").symlink_to("weights.bin")
    monkeypatch.setattr(forked, "_LARGE", 50)
    forked.mirror(folder, copy)
    copied = copy / "src" / "deep" / "train.py"
    copied.write_text("changed")
    assert (folder / "src" / "deep" / "train.py").read_text() == "small" and not copied.is_symlink()
    assert (copy / "weights.bin").resolve() == folder / "weights.bin" == (copy / "link").resolve()
    assert (copy / ".git").is_symlink() and not (copy / "room").exists()
