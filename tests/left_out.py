"""Leaves out tests that cannot run here: a line that says how many and why, in place of a skip for each. And marks slow
what ordinary runs try some cases of."""

from collections import Counter

import pytest
import torch

from fastguard import _env, kernels

_REASONS = {name: status.reason for name, status in kernels.backends().items()}
# Fixtures of tests that run the GPU kernels or compile them; `workspace` is made on a device.
_OF_THE_KERNELS = {"device", "interpreted", "compiles"}


class LeftOut:
    """A plugin of pytest. Workers tell their counts to the process that reports."""

    def __init__(self):
        self.counts = Counter()

    @pytest.hookimpl(tryfirst=True)  # before `-m` is asked
    def pytest_collection_modifyitems(self, config, items):
        kept, dropped = [], []
        num_cases = Counter()
        for item in items:
            if _is_about_the_kernels(item):
                item.add_marker("triton")
                if item.get_closest_marker("long_interpreted") and _env.triton_interpreter():
                    item.add_marker("slow")
            reason = _why_not_here(item)
            (dropped if reason else kept).append(item)
            if reason:
                self.counts[reason] += 1
            elif item.get_closest_marker("thinned") and not item.get_closest_marker("slow"):
                _thin(item, num_cases)
        if dropped:
            config.hook.pytest_deselected(items=dropped)
            items[:] = kept

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["left_out"] = dict(self.counts)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.counts = Counter(getattr(node, "workeroutput", {}).get("left_out", {}))  # the same in each worker

    def pytest_terminal_summary(self, terminalreporter):
        for reason, count in self.counts.items():
            terminalreporter.write_line(f"left out: {count} tests that {reason}")


def _thin(item, num_cases):
    """Marks a case slow, unless it is the first of the next `n` cases of its test."""
    is_interpreted = _env.triton_interpreter() and item.get_closest_marker("triton") is not None
    mark = item.get_closest_marker("thinned")
    assert mark is not None
    test = f"{item.nodeid.split('[')[0]}, interpreted: {is_interpreted}"
    n = mark.kwargs.get("interpreted" if is_interpreted else "n", 1)
    if num_cases[test] % n:
        item.add_marker("slow")
    num_cases[test] += 1


def _params(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _fixtures(item):
    return set(getattr(item, "fixturenames", ())) - set(_params(item))


def _is_about_the_kernels(item):
    params = _params(item)
    return "triton" in (params.get("backend"), params.get("engine")) or bool(_OF_THE_KERNELS & _fixtures(item))


def _why_not_here(item):
    params = _params(item)
    is_interpreting = _env.triton_interpreter()
    if item.get_closest_marker("gpu"):
        return None if torch.cuda.is_available() and not is_interpreting else "need a CUDA device"
    if "compiles" in _fixtures(item):
        return "compile the GPU kernels: TRITON_INTERPRET=1 does not" if is_interpreting else None
    if item.get_closest_marker("triton"):
        if _REASONS["triton"] is not None:
            return f"run the GPU kernels: {_REASONS['triton']}"
        if not is_interpreting and ("interpreted" in _fixtures(item) or params.get("engine") == "triton"):
            return "give the GPU kernels tensors of the CPU: TRITON_INTERPRET=1"
        if is_interpreting and item.get_closest_marker("full_size"):
            return "have too many elements for Triton's interpreter"
    if params.get("backend") == "cpu" and _REASONS["cpu"] is not None:
        return f"run the C++ kernels: {_REASONS['cpu']}"
    return None
