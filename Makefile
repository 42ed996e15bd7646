PYTHON ?= python3
PIP = .venv/bin/python -m pip --disable-pip-version-check
# What an installed environment depends on: when one of these changes, it is brought up to date.
SOURCES = pyproject.toml setup.py constraints.txt $(wildcard csrc/*)

WORKERS ?= 2
NUMBER ?= 100000
# One thread each: most tensors of the tests are tiny, and tests that are about threads ask for theirs.
OPTIONS ?=
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal $(OPTIONS)
INTERPRETED = tests/kernels tests/guard/device tests/activations

.DEFAULT_GOAL := help
.PHONY: help demo test slow-test bench faults faults-external fuzz soak kill optimizers gpu-test gpu-bench lint docs packages sanitize clean
.DELETE_ON_ERROR:

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: .venv/demo.stamp ## train a small model under guard, on real text (2 to 3 minutes)
	.venv/bin/fastguard demo

# Once as it is, and once more what runs the GPU kernels, by Triton's interpreter.
test: .venv/dev.stamp ## run the tests, but the slow ones (3 minutes on two cores)
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) -m "triton and not slow" $(INTERPRETED)

slow-test: .venv/dev.stamp ## run the slow ones
	$(PYTEST) -m slow
	TRITON_INTERPRET=1 $(PYTEST) -m "triton and slow" $(INTERPRETED)

bench: .venv/dev.stamp ## measure against torch's own functions, in turn with them as in training (8 minutes)
	.venv/bin/python -m benchmarks.speed --dry

faults: .venv/dev.stamp ## train small models with planted faults, and ask the rules; the tables show how often they are right
	.venv/bin/python -m benchmarks.faults

faults-external: .venv/dev.stamp ## train base tasks with named faults, and ask the rules (25 minutes; minutes once recorded)
	.venv/bin/python -m benchmarks.faults.external

fuzz: .venv/dev.stamp ## try the kernels, histories and logs at random (NUMBER=100000 each), and save the figures
	.venv/bin/python -m benchmarks.reliability.kernels --number $(NUMBER)
	.venv/bin/python -m benchmarks.reliability.histories --number $(NUMBER)
	.venv/bin/python -m benchmarks.reliability.logs --number $(NUMBER)

soak: .venv/dev.stamp ## take a million steps: memory and time a step must stay flat
	.venv/bin/python -m benchmarks.reliability.soak

kill: .venv/dev.stamp ## end trainings and savings at random moments, and read what they left
	.venv/bin/python -m benchmarks.reliability.kill
	.venv/bin/python -m benchmarks.reliability.checkpoints

optimizers: .venv/dev.stamp ## guard the optimizers of other packages that are installed
	.venv/bin/python -m benchmarks.optimizers

gpu-test: ## run the tests that need a GPU, with the Python that has a torch for it (PYTHON=...)
	$(PYTHON) -m pytest tests/gpu tests/kernels -m "gpu or triton"

gpu-bench: ## measure the GPU path with that Python; needs an NVIDIA GPU
	$(PYTHON) benchmarks/gpu.py
	$(PYTHON) benchmarks/gpu_activations.py

lint: .venv/dev.stamp ## ruff and mypy, as CI runs them
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/dev.stamp ## build the site in build/site; a link that leads nowhere is an error
	.venv/bin/mkdocs build --strict --quiet
	@echo "build/site/index.html"

packages: .venv/dev.stamp ## build, install and remove what is shipped; with every Python and compiler that is found
	.ci/packages all

sanitize: .venv/dev.stamp ## run the kernel tests under the address and undefined-behaviour sanitizers
	.ci/sanitize address,undefined

clean: ## remove what the targets above have made
	rm -rf .venv build dist *.egg-info fastguard/_C*.so .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

# .venv/demo.stamp has what the demo and its page need, .venv/dev.stamp everything. The install is editable, so a change
# in fastguard/ counts at once; a change in csrc/ builds the extension again.
.venv/demo.stamp: $(SOURCES) | .venv/bin/python
	$(PIP) install --quiet -c constraints.txt -e '.[report]'
	@touch $@

.venv/dev.stamp: $(SOURCES) | .venv/bin/python
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@touch $@ .venv/demo.stamp
