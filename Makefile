# `make demo` and `make test` are all a newcomer needs: each makes what it lacks.
PYTHON ?= python3
BIN := .venv/bin
PROMPT ?= The capital of France is

.PHONY: demo check test test-all test-lm-eval clean

demo: .venv/.runtime
	$(BIN)/dsv4 generate demo --prompt "$(PROMPT)" --max-new-tokens 64

# Style, and the types of the public modules.
check: .venv/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	scripts/check_types.sh

# A process a processor; the tests of a file stay together, for what they share.
test: .venv/.test
	$(BIN)/python -m pytest -n auto --dist loadfile -m "not sweep"

# Every case of every test, where `make test` takes some of each (tests/sweep.py).
test-all: .venv/.test
	$(BIN)/python -m pytest -n auto --dist loadfile

# dsv4.lm_eval beside lm_eval itself, whose fifty packages the other tests do not need: they skip what needs it.
test-lm-eval: .venv/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "lm-eval==0.4.13"
	$(BIN)/python -m pytest -n auto tests/lm_eval tests/docs/test_commands.py

.venv/.runtime: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"error: Python 3.11 or later is needed, found {v.major}.{v.minor}; run make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

.venv/.test: .venv/.runtime requirements-test.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.lock
	touch $@

clean:
	rm -rf .venv
