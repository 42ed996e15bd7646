"""What a source distribution and a wheel hold: all that they need, and nothing else.

    python .ci/check_packages.py SOURCE fastguard-0.2.0.tar.gz fastguard-0.2.0-cp311-cp311-linux_x86_64.whl

SOURCE is the clean checkout that they were made from.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# What the extension may ask the system for. torch is not among them: it is reached through DLPack and Python.
SYSTEM = r"lib(stdc\+\+|m|gomp|omp|gcc_s|c|pthread)\.so(\.\d+)*|ld-linux-[\w-]+\.so\.\d"


def files(source: Path, *folders: str) -> set[str]:
    """Files in these folders of the source."""
    paths = (path for folder in folders for path in (source / folder).rglob("*") if path.is_file())
    return {path.relative_to(source).as_posix() for path in paths}


def sdist_problems(source: Path, path: Path) -> list[str]:
    """What is missing from the source distribution, or too much in it."""
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = files(source, "fastguard", "csrc", "tests", "docs", "benchmarks")
    wanted |= {"README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md", "pyproject.toml", "setup.py", "constraints.txt"}
    found = [f"{path.name} lacks {name}" for name in sorted(wanted - names)]
    return found + [f"{path.name} holds {name}" for name in sorted(names) if re.search(r"\.(so|o|pyc|pyd)$", name)]


def wheel_problems(source: Path, path: Path) -> list[str]:
    """What is missing from the wheel, or too much in it; and what its extension asks for."""
    with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
        names = set(archive.namelist())
        archive.extractall(folder)
        code = {name for name in names if name.startswith("fastguard/")}
        info = {name for name in names if re.match(r"fastguard-[^/]*\.dist-info/", name)}
        kinds = (".py", ".pyi", "py.typed", "fitted.json", ".html", ".css", ".js")
        wanted = {name for name in files(source, "fastguard") if name.endswith(kinds)}
        extensions = {name for name in code if re.fullmatch(r"fastguard/_C\.[\w.-]+\.so", name)}
        found = [f"{path.name} lacks {name}" for name in sorted(wanted - code)]
        found += [f"{path.name} holds {name}" for name in sorted(names - info - wanted - extensions)]
        if len(extensions) != 1:
            return [*found, f"{path.name} must hold one extension, got {sorted(extensions)}"]
        return found + extension_problems(Path(folder, extensions.pop()))


def extension_problems(path: Path) -> list[str]:
    """Libraries that the extension asks for beyond the system's, paths that it carries, and symbols of torch's."""
    dynamic = subprocess.run(["readelf", "-d", path], check=True, capture_output=True, text=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    found = [f"{path.name} needs {name}" for name in needed if not re.fullmatch(SYSTEM, name)]
    if not needed:
        found.append(f"{path.name}: readelf tells of no library that it needs")
    found += [f"{path.name} carries a path: {line.strip()}" for line in dynamic.splitlines() if "PATH)" in line]
    symbols = subprocess.run(["nm", "-D", "-C", path], check=True, capture_output=True, text=True).stdout
    torchs = [line.strip() for line in symbols.splitlines() if re.search("torch|c10::", line)]
    return found + [f"{path.name} names {symbol}" for symbol in torchs]


def main(source: str, sdist: str, wheel: str) -> int:
    """Prints what is wrong; returns the exit code."""
    found = sdist_problems(Path(source), Path(sdist)) + wheel_problems(Path(source), Path(wheel))
    sizes = ", ".join(f"{Path(path).name} {Path(path).stat().st_size / 1e6:.1f} MB" for path in (sdist, wheel))
    print("\n".join(found) or f"nothing missing, nothing stray: {sizes}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
