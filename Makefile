# make demo: set up, start a target and a draft worker, show text and figures.   make test: set up, run every test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test proto format clean

install: $(STAMP)

$(STAMP): requirements.txt requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	touch $@

demo: install
	$(BIN)/python scripts/demo.py

# Two processes, one thread each: a model in a test is tiny, and threads of several processes would fight for cores.
test: install
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadscope

proto: install
	$(BIN)/python -m grpc_comm.generate

format: install
	$(BIN)/ruff format . && $(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache
