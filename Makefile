# Makefile - the ways in: `make help` names them. Everything is set up on the way: .venv, system packages when root, the build.

PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
STAMPS := build/stamps
WORKERS := -n 3 --dist worksteal# a third of a test is waiting; more of them would disturb each other
SAN_WORKERS := -n 4 --dist worksteal# most of a C test is waiting
EXTENSION := $(shell find cython -name '*.[ch]' ! -name _core.c -o -name '*.px[di]' -o -name '*.pyx' -o -name '*.def')
C_FILES := $(shell find cython tests benchmarks -name '*.[ch]' ! -name _core.c)
PACKAGES := $(wildcard hrdma/__init__.py topo/__init__.py qos/__init__.py)
unexport PYTHONDONTWRITEBYTECODE# each of the thousands of processes that tests start would compile all that it imports

.DEFAULT_GOAL := fast
.DELETE_ON_ERROR:

# --- set-up: each stamp is younger than what it was made from ---

.venv/pyvenv.cfg: tools/bootstrap
	@tools/bootstrap

# What setup, extras of pyproject.toml and the interpreter need; pip asks no network for what is there. It would compile all of it on one
# processor, and half of that nobody imports.
$(STAMPS)/%.pip: pyproject.toml tools/requirements.py .venv/pyvenv.cfg
	@mkdir -p $(@D)
	@echo "pip: the requirements for $*"
	@$(PY) tools/requirements.py $* >$@.txt && $(PIP) install --no-compile -r $@.txt
	@$(PY) -m compileall -q -j 0 -x '/(tests|scipy|sklearn|Cython|pip)/' $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || :
	@touch $@

# pip compiles everything anew in a folder that it throws away, so it is called only where more than the extension changed.
$(STAMPS)/hrdma: $(EXTENSION) setup.py pyproject.toml $(PACKAGES) $(STAMPS)/build.pip $(STAMPS)/run.pip
	@echo "building hrdma$(if $(filter-out $(EXTENSION),$?),,._core)"
	@$(if $(filter-out $(EXTENSION),$?),$(PIP) install --no-build-isolation --no-deps -e .,\
		$(PY) setup.py -q build_ext --inplace --build-temp build/extension)
	@$(PY) -m compileall -q hrdma topo qos
	@touch $@

.PHONY: build fast demo lab test test-rxe test-ray test-pythons check san bench bench-quick bench-parts clean help
build: $(STAMPS)/hrdma

# --- what users call ---

fast: build $(STAMPS)/test.pip ## build, and run the fast tests (plain `make`)
	$(PY) -m pytest $(WORKERS) -q -m "not slow"

demo: build $(STAMPS)/demo.pip ## data-parallel training on four ranks
	.venv/bin/hrdma run -n 4 -m hrdma.examples.train_digits

lab: build ## a network of 9 hosts with 2 NICs each on this machine, to measure in (root)
	.venv/bin/hrdma lab up bcube --n 3 --levels 2 --rate 200mbit

# Tests hold what the library asks of the kernel against what ip and tc say of it; without them those are skipped.
$(STAMPS)/test.system:
	@[ "$$(id -u)" != 0 ] || { command -v ip && command -v tc; } >/dev/null || tools/bootstrap packages iproute2
	@mkdir -p $(@D) && touch $@

test: build $(STAMPS)/test.pip $(STAMPS)/test.system ## every test that this machine can run; ends with what was skipped and why
	$(PY) -m pytest $(WORKERS) --durations=10 --durations-min=2

test-rxe: build $(STAMPS)/test.pip ## soft-RoCE tests in virtual machines; results in build/rxe_vm (part of make test)
	HRDMA_STRICT=1 $(PY) -m pytest -s -v tests/rxe_stage/test_rxe_stage_in_guests.py --junitxml=build/rxe_vm/junit.xml

test-ray: build $(STAMPS)/test.pip $(STAMPS)/ray.pip ## installs Ray, and tests hrdma inside it
	HRDMA_STRICT=1 $(PY) -m pytest -v tests/integrations

test-pythons: build $(STAMPS)/test.pip ## builds and tries the package with each Python of this machine, 3.10 to 3.14
	$(PY) -m pytest -v -rs --nightly tests/test_pythons.py

CHECKS := check-ruff check-format check-cython check-types check-c check-layers
.PHONY: $(CHECKS)
check: $(CHECKS) ## lint, formatting, types, layers (-k: go on after a failure)

$(CHECKS): $(STAMPS)/dev.pip
check-ruff:
	$(PY) -m ruff check .
check-format:
	$(PY) -m ruff format --check .
check-cython:
	PATH="$(CURDIR)/.venv/bin:$$PATH" cython-lint cython
# mypy does not see through the editable install's map of folders, so it gets the packages as a wheel has them.
check-types: build
	@rm -rf build/types && $(PY) setup.py -q build_py --build-lib build/types
	cd build/types && ../../$(PY) -m mypy --config-file ../../pyproject.toml
check-c:
	@echo "clang-format --dry-run -Werror, $(words $(C_FILES)) files"
	@.venv/bin/clang-format --dry-run -Werror $(C_FILES)
check-layers: $(STAMPS)/test.pip
	$(PY) -m pytest -q tests/test_layers.py

san: $(STAMPS)/test.pip ## the C tests under the address, undefined and thread sanitizers
	$(PY) -m pytest $(SAN_WORKERS) tests/test_core.py --flavour asan --flavour tsan

BENCHMARKS := $(patsubst benchmarks/core/%.c,build/c/plain/%,$(wildcard benchmarks/core/bench_*.c))
FOUND = build/bench/$@
SIDE_BY_SIDE = $(PY) benchmarks/side_by_side.py --json $(FOUND).json --markdown $(FOUND).md --picture $(FOUND).png
bench: build ## hrdma, its peers and the machine's limits side by side; tables and a picture in build/bench
	@$(SIDE_BY_SIDE)

bench-quick: build ## the same in three minutes: shared memory, 2 and 4 ranks, three cases
	@$(SIDE_BY_SIDE) --quick

bench-parts: build ## providers below the engine, planning and priority, beside the bare machine where that can be
	@$(MAKE) -s -f tests/core/Makefile FLAVOUR=plain benchmarks
	@set -e; for program in $(BENCHMARKS) "$(PY) benchmarks/bench_planning.py --times" \
		"$(PY) benchmarks/bench_topo.py --quick" \
		".venv/bin/hrdma run -n 2 benchmarks/bench_priority.py" "$(PY) benchmarks/bench_objects.py"; do echo; echo "$$program"; $$program; done

clean: ## what was built; .venv stays
	rm -rf build dist *.egg-info hrdma/_core*.so cython/_core.c .pytest_cache .mypy_cache .ruff_cache
	find hrdma topo qos tests tools benchmarks -name __pycache__ -prune -exec rm -rf {} +

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' Makefile | sort | while IFS="$$(printf '\t')" read -r name what; do \
		printf 'make %-11s %s\n' "$$name" "$$what"; done
