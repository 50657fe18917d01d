# Every target uses .venv, which `install` makes once and refreshes when the requirements change.
PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
RUN := runs/smoke_test
CONFIG := configs/smoke_test.yaml
PARTICIPANTS := 120
# two test files at a time, one thread each: faster on two cores than one file with two threads
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install test test-slow soak tpu-fit-env lint demo clean-demo

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/installed ## make .venv with everything that the targets need

$(VENV)/installed: requirements.txt requirements-dev.txt
	@mkdir -p $(RUN)
	@start=$$(date +%s) && test -x $(PY) || $(PYTHON) -m venv $(VENV) && \
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt && \
	printf 'install\t%s\n' $$(( $$(date +%s) - start )) >> $(RUN)/stages.tsv
	@touch $@

test: install ## the default tests
	$(PYTEST) -m "not slow and not soak and not xla and not gpu"

test-slow: install ## longer tests
	$(PYTEST) -m "slow"

soak: install ## long proofs, run by hand
	$(PY) -m pytest -m "soak" --timeout 7200

tpu-fit-env: install ## the two environments of pretraining.tpu_fit (9 GB, minutes)
	$(PY) -m utils.tpu_env

lint: install ## ruff check and format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# one timed stage of the demo: $(call stage,name,command)
define stage
	@echo "== $(1)" && mkdir -p $(RUN) && start=$$(date +%s) && $(2) && \
	printf '%s\t%s\n' $(1) $$(( $$(date +%s) - start )) >> $(RUN)/stages.tsv
endef

demo: install ## phantom data -> store -> pre-training -> probe -> report, in minutes on a CPU
	$(call stage,phantom,test -f runs/phantom/synthetic.json || $(PY) -m data_setup.phantom --out runs/phantom --participants $(PARTICIPANTS) --seed 0 --size small --faults)
	$(call stage,prepare,$(PY) -m data_setup.prepare --config $(CONFIG))
	$(call stage,pretrain,$(PY) -m pretraining.train --config $(CONFIG))
	$(call stage,evaluate,$(PY) -m finetuning.evaluate --config $(CONFIG))
	@$(PY) -m utils.report --run $(RUN)

clean-demo: ## remove what demo made
	rm -rf runs/phantom runs/.phantom.phantom-partial runs/phantom_store $(RUN)
