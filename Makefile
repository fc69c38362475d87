# The two things to type first: `make demo` and `make test`. Each sets up all it needs in .venv.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/installed
	$(BIN)/minigpt train --preset tiny --out demo --force
	@echo; echo "== with the cache"
	$(BIN)/minigpt generate --checkpoint demo --prompt "MARGIT:" --length 1000 --seed 1 --cache
	@echo; echo "== without it: the same text, recomputed for every character"
	$(BIN)/minigpt generate --checkpoint demo --prompt "MARGIT:" --length 1000 --seed 1 --no-cache

test: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest

clean:
	rm -rf .venv

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[fast]'
	touch $@

.venv/installed-test: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	touch $@ .venv/installed
