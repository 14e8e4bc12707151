# `make quickstart` and `make test` need Python 3.11 or newer and install everything else into .venv.
VENV ?= .venv
PYTHON ?= python3
BIN = $(VENV)/bin

.PHONY: install quickstart test
install: $(VENV)/installed

quickstart: install
	$(BIN)/litgrpo fit -c configs/quickstart.yaml

test: install
	$(BIN)/python -m pytest

$(VENV)/installed: requirements.txt setup.cfg
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'litgrpo needs Python 3.11 or newer; give it as make PYTHON=...')"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@
