# Every target uses .venv. `demo` makes it with requirements.txt, the others add the tools of requirements-dev.txt; each
# is refreshed when its requirements change. test-xla uses
# .venv-xla, because torch_xla goes with one version of torch; so its versions are those of constraints-tpu.txt.
PYTHON ?= $(firstword $(foreach minor,11 12 13,$(shell command -v python3.$(minor))) python3.11)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check
TORCH_INDEX ?= $(shell test "$$(uname)" = Linux && ! command -v nvidia-smi > /dev/null && echo https://download.pytorch.org/whl/cpu)
XLA_VENV := .venv-xla
LOCK_VENV := .venv-lock
RUN := runs/smoke_test
CONTROL := runs/smoke_control
CONFIG := configs/smoke_test.yaml
SOURCES := data_setup models pretraining finetuning utils benchmarks
PARTICIPANTS := 120
PHANTOM = test -f runs/phantom/synthetic.json || $(PY) -m data_setup.phantom --out runs/phantom --participants $(PARTICIPANTS) --seed 0 --size small --faults
COMPARE := runs/compare
STEPS := 160
# 15 encoders are fine-tuned (5 rows, 3 seeds), so one epoch of small batches each
COLUMNS := fine-tuned
TUNING := train.epochs=1 train.global_batch_size=8 train.per_core_batch_size=8
SINGLE_DOMAIN := data.list_strategy=single_domain data.device_filter=[zeiss_cirrus]
# two test files at a time, one thread each: faster on two cores than one file with two threads; with bytecode, or each
# process that a test starts compiles this tree again
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help install lock lock-tpu test test-slow test-gpu test-xla soak tpu-fit-env lint docs demo clean-demo \
    compare clean-compare

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/installed-dev ## make .venv with everything that the targets need

# pip would write the bytecode of all packages, 0.3 GB and a minute; so only these and what they import get theirs
IMPORTED := torch, monai.transforms, pandas, pyarrow.parquet, sklearn.linear_model, scipy.stats, zarr, pydicom, \
    matplotlib.pyplot, plotly.offline, wandb, nibabel, tifffile, gcsfs, s3fs
# and 120 MB of tests go that two wheels bring
TESTS_OF_WHEELS := $(addprefix $(VENV)/lib/python3*/site-packages/,torch/test pandas/tests)

# torch comes first where there is no NVIDIA driver: PyPI's brings 5 GB of CUDA's libraries. `TORCH_INDEX=` takes PyPI's.
$(VENV)/installed: requirements.txt constraints.txt
	@mkdir -p $(RUN)
	@echo "== install: packages into $(VENV), minutes; 1.6 GB, with CUDA 6 GB"
	@start=$$(date +%s); test -x $(PY) || $(PYTHON) -m venv $(VENV) && \
	if [ -n "$(TORCH_INDEX)" ]; then $(PIP) --no-compile --no-deps --retries 1 "$$(grep '^torch==' constraints.txt)" \
	    --index-url $(TORCH_INDEX) || \
	    echo "$(TORCH_INDEX): not reached, so torch comes from PyPI, with CUDA's libraries"; fi; \
	$(PIP) --no-compile -r requirements.txt -c constraints.txt && rm -rf $(TESTS_OF_WHEELS) && \
	env -u PYTHONDONTWRITEBYTECODE $(PY) -c "import $(IMPORTED)" && \
	printf 'install\t%s\n' $$(( $$(date +%s) - start )) >> $(RUN)/stages.tsv
	@touch $@

$(VENV)/installed-dev: $(VENV)/installed requirements-dev.txt
	@echo "== install: the tools of the tests into $(VENV)"
	@$(PIP) -r requirements-dev.txt -c constraints.txt
	-@$(PY) -m compileall -qq -j 0 $(VENV)/lib # some packages hold templates that are no Python
	@touch $@

lock: ## write constraints.txt again, from the newest versions that the requirements allow
	rm -rf $(LOCK_VENV)
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	head -n 1 constraints.txt > $(LOCK_VENV)/constraints.txt
	$(LOCK_VENV)/bin/python -m pip --disable-pip-version-check list --format=freeze | grep -v '^pip==' \
	    | sed 's/+[A-Za-z0-9.]*$$//' >> $(LOCK_VENV)/constraints.txt
	mv $(LOCK_VENV)/constraints.txt constraints.txt
	rm -rf $(LOCK_VENV)

test: install ## the default tests
	$(PYTEST) -m "not slow and not soak and not xla and not gpu" --durations 12

test-slow: install ## longer tests
	$(PYTEST) -m "slow" --durations 20

lock-tpu: ## write constraints-tpu.txt again, from the newest versions that the requirements allow
	rm -rf $(LOCK_VENV)
	$(PYTHON) -m venv $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv
	head -n 1 constraints-tpu.txt > $(LOCK_VENV)/constraints.txt
	$(LOCK_VENV)/bin/uv pip compile --quiet --no-header --no-annotate --python-version 3.11 \
	    --python-platform x86_64-manylinux_2_31 --output-file $(LOCK_VENV)/all.txt requirements-tpu.txt
	grep -Ev '^(nvidia-|triton==)' $(LOCK_VENV)/all.txt >> $(LOCK_VENV)/constraints.txt
	mv $(LOCK_VENV)/constraints.txt constraints-tpu.txt
	rm -rf $(LOCK_VENV)
test-gpu: install ## the tests that need a CUDA device; without one each says so and skips
	$(PY) -m pytest -m "gpu"

# what a TPU worker has, without the TPU's own library: 8.4 GB, and 4 GB more while pip unpacks it; nothing else uses its
# wheels, so they are not kept
$(XLA_VENV)/installed: requirements.txt requirements-tpu.txt requirements-dev.txt constraints-tpu.txt
	test -x $(XLA_VENV)/bin/python || $(PYTHON) -m venv $(XLA_VENV)
	$(XLA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-cache-dir \
	    -c constraints-tpu.txt -r requirements.txt \
	    $$(sed '/^-r/d; /^#/d; s/\[tpu\]//' requirements-tpu.txt) $$(grep '^pytest' requirements-dev.txt)
	@touch $@

test-xla: $(XLA_VENV)/installed ## the XLA engine, on four devices of this CPU
	env -u PYTHONDONTWRITEBYTECODE \
	    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 XLA_FLAGS=--xla_backend_optimization_level=0 OMP_NUM_THREADS=1 \
	    $(XLA_VENV)/bin/python -m pytest -n 2 --dist loadfile -m "xla" \
	    tests/utils/test_xla.py tests/whole_runs/test_two_hosts.py tests/whole_runs/test_xla_run.py \
	    tests/whole_runs/test_xla_command.py \
	    tests/models/test_xla_attention.py tests/benchmarks/test_tpu_fit.py \
	    tests/finetuning/test_finetune_xla.py

# SimpleITK and oct-converter, which brings OpenCV: 640 MB for two files of tests. 0.7.0 is what those tests know: they
# mend a call of it that numpy 2.3 refuses.
soak: install ## long proofs, run by hand
	$(PIP) 'SimpleITK>=2.4' oct-converter==0.7.0
	$(PY) -m pytest -m "soak" --timeout 7200

tpu-fit-env: install ## the two environments of benchmarks.tpu_fit (9 GB, minutes)
	$(PY) -m benchmarks.tpu_fit.env

lint: install ## ruff check and format, types by mypy, licences of all packages
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(PY) -m pytest -q tests/test_packaging.py -k licence

docs: install ## the site of docs/ in site/; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet
	@echo "site/index.html"

# one timed stage of demo or compare: $(call stage,name,command). A stage that is in $(RUN)/done is over; one that runs
# takes those after it out. What is printed as a table goes into a file of the run.
define stage
	@if grep -qsx $(1) $(RUN)/done; then echo "== $(1): done before"; else \
	    echo "== $(1)" && mkdir -p $(RUN) && touch $(RUN)/done && sed -i.bak '/^$(1)$$/,$$d' $(RUN)/done && \
	    start=$$(date +%s) && $(2) && printf '%s\t%s\n' $(1) $$(( $$(date +%s) - start )) >> $(RUN)/stages.tsv && \
	    echo $(1) >> $(RUN)/done; fi
endef

# nothing is done where the code, a configuration, the phantom or the store is another one
define forget
	@test -d runs/phantom -a -d runs/phantom_store && test -z "$$(find $(SOURCES) $(CONFIG) Makefile \
	    '(' -name '*.py' -o -name '*.yaml' -o -name Makefile ')' -newer $(RUN)/done -print -quit 2>&1)" || rm -f $(RUN)/done
endef

demo: $(VENV)/installed ## phantom data -> store -> pre-training -> truth and probe -> report, in minutes on a CPU
	$(forget)
	$(call stage,phantom,$(PHANTOM))
	$(call stage,prepare,$(PY) -m data_setup.prepare --config $(CONFIG))
	$(call stage,pretrain,$(PY) -m pretraining.train --config $(CONFIG))
	$(call stage,control,$(PY) -m pretraining.train --config $(CONFIG) run.dir=$(CONTROL) train.max_steps=2 wandb.mode=disabled)
	$(call stage,truth,$(PY) -m benchmarks.phantom_truth --config $(CONFIG) --control $(CONTROL) > $(RUN)/truth.txt)
	$(call stage,evaluate,$(PY) -m finetuning.evaluate --config $(CONFIG) > $(RUN)/evaluation.txt)
	@$(PY) -m utils.report $(RUN)
	@test $$(wc -c < $(RUN)/report.html) -lt 15000000 || { echo "$(RUN)/report.html: expected under 15 MB"; exit 1; }

clean-demo: ## remove what demo made
	rm -rf runs/phantom runs/.phantom.phantom-partial runs/phantom_store $(RUN) $(CONTROL)

LEADERBOARD = $(PY) -m finetuning.compare --config configs/cls_linear_probe.yaml --checkpoints \
    $(COMPARE)/multi_domain $(COMPARE)/single_domain_seed_0 $(COMPARE)/single_domain_seed_1 \
    --control $(COMPARE)/two_steps --columns '$(COLUMNS)' run.dir=$(COMPARE)/task $(TUNING)

# one pre-training of compare: $(call pretrain,name,overrides)
define pretrain
	$(call stage,$(1),$(PY) -m pretraining.train --config $(CONFIG) run.dir=$(COMPARE)/$(1) wandb.mode=disabled $(2))
endef

# the first checkpoint's store and filters are the leaderboard's: multi-domain, or only one device would be evaluated
compare: RUN := $(COMPARE)
compare: $(VENV)/installed ## three pre-trainings (two seeds of one device, all devices) side by side, on the phantom
	$(forget)
	$(call stage,phantom,$(PHANTOM))
	$(call stage,prepare,$(PY) -m data_setup.prepare --config $(CONFIG))
	$(call pretrain,multi_domain,train.max_steps=$(STEPS))
	$(call pretrain,single_domain_seed_0,train.max_steps=$(STEPS) $(SINGLE_DOMAIN))
	$(call pretrain,single_domain_seed_1,train.max_steps=$(STEPS) $(SINGLE_DOMAIN) seed=1)
	$(call pretrain,two_steps,train.max_steps=2)
	$(call stage,leaderboard,$(LEADERBOARD))
	@awk '{ seconds[$$1] += $$2; if (!($$1 in order)) { order[$$1] = ++n; name[n] = $$1 } } \
	    END { printf "seconds"; for (i = 1; i <= n; i++) printf "  %s %d", name[i], seconds[name[i]]; print "" }' $(RUN)/stages.tsv

clean-compare: ## remove what compare made; the phantom and its store are the demo's: clean-demo
	rm -rf $(COMPARE)
