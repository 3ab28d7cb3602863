# Every target first makes .venv or brings it up to date (scripts/setup_env.py); that takes no time if nothing changed.
# Pass options through:  make test ARGS="-k l2"    make smoke ARGS="--only 0,1"    make setup ARGS="--extras gpu"
ifeq ($(OS),Windows_NT)
PYTHON ?= python
else
PYTHON ?= python3
endif
RUN = $(PYTHON) scripts/setup_env.py --run
export NO_MKDOCS_2_WARNING = 1
SHARD ?= 1/1
# two processes, each with whole files of tests: a file's fixtures, such as a server or a browser, start once
TWO_AT_A_TIME = -n 2 --dist loadfile

.PHONY: help setup lock smoke report test test-all proofs serve lint format site serve-site bench clean
.NOTPARALLEL:

help:
	@echo "make smoke       run every lesson on the pocket model and compare its tokens with Hugging Face's"
	@echo "make report      say what this machine is, whether all is right on it, and how fast; ten minutes at most"
	@echo "make test        run the lessons' tests, and those of what students work with, in three minutes"
	@echo "make test-all    run every test; SHARD=1/4 runs a quarter of them"
	@echo "make proofs      prove a lesson's tasks, pitfalls and known answers: make proofs LESSON=7"
	@echo "make serve       serve an OpenAI-compatible API at http://127.0.0.1:8000/v1"
	@echo "make setup       only make .venv; the other targets do this automatically"
	@echo "make lock        rewrite scripts/constraints.txt after moving a pin in pyproject.toml"
	@echo "make lint        check rules and formatting with ruff, types with pyright"
	@echo "make format      let ruff format the code and fix what it can"
	@echo "make site        build the website into build/site, in strict mode"
	@echo "make serve-site  show the website at http://127.0.0.1:8000, rebuilt on each save"
	@echo "make bench       measure the engine (scripts/bench.py): make bench ARGS=--help"
	@echo "make clean       remove caches and the built site; .venv and work/ are kept"
	@echo
	@echo "ARGS=\"...\" is passed to the command: make test ARGS=\"-k l2\". PYTHON=python3.12 selects another Python."

setup:
	@$(PYTHON) scripts/setup_env.py $(ARGS)

lock:
	@$(PYTHON) -m scripts.setup.lock_versions $(ARGS)

smoke:
	@$(RUN) scripts/smoke_all.py $(ARGS)

report:
	@$(RUN) scripts/report.py $(ARGS)

test:
	@$(RUN) -m pytest $(TWO_AT_A_TIME) $(ARGS)

test-all:
	@$(RUN) -m pytest -m "" $(TWO_AT_A_TIME) -p tests.shards --shard $(SHARD) $(ARGS)

proofs:
	@$(RUN) -m pytest -m "" tests/course/test_lessons_proofs.py tests/course/test_lessons_answers.py -k "l$(LESSON)_" $(ARGS)

serve:
	@$(RUN) -m mini_engine serve $(ARGS)

lint:
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m pyright

format:
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

site:
	@$(RUN) -m scripts.website.live --optional
	@$(RUN) -m mkdocs build --strict $(ARGS)

serve-site:
	@$(RUN) -m scripts.website.live --optional
	@$(RUN) -m mkdocs serve $(ARGS)

bench:
	@$(RUN) scripts/bench.py $(ARGS)

clean:
	rm -rf build .pytest_cache .ruff_cache .hypothesis
	find mini_engine lessons scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
