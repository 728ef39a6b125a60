# For the development of the template. A generated project has a Makefile of its own.
# Everything is installed into .venv here; nothing else on the machine is touched. For another Python:
#   make test VENV=build/newest BASE=python3.13

VENV := .venv
BASE := python3
PYTHON := $(VENV)/bin/python
UV := $(VENV)/bin/uv
RUFF := $(PYTHON) -m ruff
# Else ruff obeys the pyproject.toml of the project still to be rendered, and leaves a cache there.
ONE := --config pyproject.toml --no-cache
DEMO := build/demo
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-quick check format clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  \1|/' | \
	    awk -F'|' '{ printf "%-12s %s\n", $$1, $$2 }'

setup: $(VENV)/.setup ## Install what the other targets need (they do this first)

# The template's tests run the generated code, so its dependencies are installed as well: those of a
# project that is rendered for this purpose, because pyproject.toml here does not repeat them.
$(VENV)/.setup: pyproject.toml {{cookiecutter.project_slug}}/pyproject.toml
	@$(BASE) -c 'import sys; sys.exit("Python 3.11 or later is needed" if sys.version_info < (3, 11) else 0)'
	@{ $(PYTHON) -c '' && test -x $(UV); } 2> /dev/null || { $(BASE) -m venv --clear $(VENV) && \
	    $(PYTHON) -m pip install --quiet --disable-pip-version-check uv; }
	$(UV) pip install --quiet --python $(PYTHON) --group dev
	@rm -rf build/setup && mkdir -p build/setup
	@$(PYTHON) -m cookiecutter . --no-input --accept-hooks no --output-dir build/setup
	$(UV) pip install --quiet --python $(PYTHON) --extra dev \
	    --requirements build/setup/my_flax_project/pyproject.toml
	@touch $@

demo: setup ## Generate the default project, smoke test included, and train it
	@rm -rf $(DEMO) && mkdir -p $(DEMO)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PYTHON) -m cookiecutter . --no-input --output-dir $(DEMO)
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(MAKE) -C $(DEMO)/my_flax_project train

PYTEST := PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PYTHON) -m pytest -n 2 --dist worksteal

test: setup ## Run all tests of the template: half an hour on two cores
	$(PYTEST) $(ARGS)

test-quick: setup ## Run the tests that are not marked slow: three minutes
	$(PYTEST) -m "not slow" $(ARGS)

check: setup ## Lint and formatting; changes nothing
	$(RUFF) check $(ONE) . && $(RUFF) format $(ONE) --check .

format: setup ## Format the code and sort its imports
	$(RUFF) check $(ONE) --quiet --fix --select I . && $(RUFF) format $(ONE) .

clean: ## Remove what the other targets made
	rm -rf .venv build .pytest_cache .ruff_cache
