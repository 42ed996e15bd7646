"""A confined process can change nothing outside of its folders, and a copy of a folder is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fastguard.experiments import forked

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
