"""Builds fastguard._C from csrc/. Everything else about the package stands in pyproject.toml.

Read from the environment:
    CXX                   the C++ compiler (default: the one Python was built with, else c++, g++ or clang++)
    FASTGUARD_NO_EXT=1    install without the extension; the reference backend then serves everything
    FASTGUARD_SANITIZE    "address", "undefined", "address,undefined" or "thread": a slow build for tests
"""

import glob
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from pybind11 import get_include
from pybind11.setup_helpers import ParallelCompile
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

# No -ffast-math and no -march: results must be bit-identical on every machine, and the sources choose the
# instruction set at run time. -fno-fast-math undoes what a CFLAGS from outside may have asked for.
CXX_FLAGS = [
    *("-std=c++17", "-O3", "-g0", "-fvisibility=hidden"),
    *("-fno-fast-math", "-ffp-contract=off", "-fno-math-errno"),
    *("-Wall", "-Wextra"),
]
PROBE = '#include <optional>\nextern "C" int probe() { return std::optional<int>(1).value(); }\n'
PROBE_PYTHON = "#include <Python.h>\n" + PROBE
PROBE_OPENMP = '#include <omp.h>\nextern "C" int probe() { return omp_get_max_threads(); }\n'
WAY_OUT = "or set FASTGUARD_NO_EXT=1 to install without the extension."


def sanitizer_flags() -> list[str]:
    wanted = os.environ.get("FASTGUARD_SANITIZE", "")
    if not wanted:
        return []
    if wanted != "thread" and (unknown := sorted(set(wanted.split(",")) - {"address", "undefined"})):
        fail(f"`FASTGUARD_SANITIZE` must be thread, or address and/or undefined with a comma, got {unknown[0]!r}.")
    # Python's own -fwrapv would hide every signed overflow.
    return [f"-fsanitize={wanted}", "-fno-sanitize-recover=all", "-fno-wrapv", "-fno-omit-frame-pointer", "-g", "-O1"]


def fail(message: str) -> None:
    sys.stdout.flush()
    raise SystemExit(f"fastguard: {message}")  # not an exception: pip then shows this line and no traceback


class BuildKernels(build_ext):
    def initialize_options(self) -> None:
        super().initialize_options()
        if sys.platform == "win32":
            self.compiler = "mingw32"  # setuptools' name for GCC there

    def run(self) -> None:
        default = sysconfig.get_config_var("CXX") or "c++"
        self.tried = [os.environ["CXX"]] if os.environ.get("CXX") else [default, "c++", "g++", "clang++"]
        self.cxx = next((command for command in self.tried if shutil.which(command.split()[0])), None)
        if self.cxx:
            os.environ["CXX"] = self.cxx
        super().run()

    def build_extensions(self) -> None:
        if self.compiler.compiler_type == "msvc":
            fail(f"MSVC is not supported: the kernels need GCC's vector extensions. Use MinGW-w64, {WAY_OUT}")
        if not self.cxx:
            tried = ", ".join(dict.fromkeys(self.tried))
            fail(f"no C++17 compiler found (tried: {tried}). Install one (e.g. `apt install g++`), {WAY_OUT}")
        flags = CXX_FLAGS + sanitizer_flags()
        if not self.builds(PROBE, flags):
            fail(f"`{self.cxx}` cannot build a C++17 library (its message is above). Repair or replace it, {WAY_OUT}")
        if not self.builds(PROBE_PYTHON, flags):
            fail(f"Python.h is missing. Install Python's headers (e.g. `apt install python3-dev`), {WAY_OUT}")
        if os.environ.get("FASTGUARD_SANITIZE") == "thread":
            print("fastguard: built without OpenMP, whose runtime the thread sanitizer does not see into.")
        elif self.builds(PROBE_OPENMP, [*flags, "-fopenmp"]):
            flags.append("-fopenmp")
        else:
            print(f"fastguard: `{self.cxx}` cannot build with -fopenmp; the kernels will run on one thread.")
        for extension in self.extensions:
            extension.extra_compile_args = flags
            extension.extra_link_args = [*flags, "-static"] if sys.platform == "win32" else flags  # no DLL beside it
        num_jobs = min(4, os.cpu_count() or 1)
        num_files = sum(len(extension.sources) for extension in self.extensions)
        print(
            f"fastguard: compiling {num_files} C++ files with {self.cxx}, {num_jobs} at a time: a minute or two on two "
            "idle cores, more on a busy machine. pip shows this only with -v.",
            flush=True,
        )
        self.force = True  # an up-to-date file may have been built with other flags
        with ParallelCompile(default=num_jobs):
            super().build_extensions()

    def builds(self, source: str, flags: list[str]) -> bool:
        """Whether a library of this one source compiles and links with these flags."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "probe.cpp")
            path.write_text(source)
            try:
                objects = self.compiler.compile([str(path)], folder, extra_postargs=flags)
                self.compiler.link_shared_object(
                    objects, str(Path(folder, "probe.so")), extra_postargs=flags, target_lang="c++"
                )
            except (CompileError, LinkError):
                return False
            return True


kernels = Extension(
    "fastguard._C",
    sources=sorted(glob.glob("csrc/*.cpp")),
    depends=sorted(glob.glob("csrc/*.h") + glob.glob("csrc/*.inc")),
    include_dirs=["csrc", get_include()],
    language="c++",
)

setup(
    ext_modules=[] if os.environ.get("FASTGUARD_NO_EXT", "0") not in ("", "0") else [kernels],
    cmdclass={"build_ext": BuildKernels},
)
