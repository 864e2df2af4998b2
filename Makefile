# Every target makes .venv first when it is missing or out of date.
PY := .venv/bin/python
DATA ?= ../shared/data
OUT ?= out

.PHONY: help venv test check generate format lock models

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

venv: ## make .venv as requirements.txt locks it
	@bash hack/venv.sh

test: venv ## run every test; those on traces need DATA, the folder they are in
	TRIMTAB_DATA=$(abspath $(wildcard $(DATA))) $(PY) -m pytest

check: venv ## ruff, mypy --strict, import-linter, generated files
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy .
	.venv/bin/lint-imports
	$(PY) -m trimtab_pipelines.schema pipelines/schema --check

generate: venv ## render the generated files anew
	$(PY) -m trimtab_pipelines.schema pipelines/schema

format: venv ## format and fix what can be fixed
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lock: venv ## resolve requirements.txt anew
	.venv/bin/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --all-extras --group dev \
	  --no-emit-index-url --custom-compile-command "make lock" -o requirements.txt pyproject.toml

models: venv ## train the digits models anew (fixed seeds)
	$(PY) -m trimtab_model_servers.digits.train -o pipelines/digits

.PHONY: bench-solver
bench-solver: venv ## time the exact solver and compare it with brute force
	$(PY) -m benchmarks.solver

.PHONY: train-predictor
train-predictor: venv ## train the load forecaster anew
	$(PY) -m trimtab_predictor.train --trace $(DATA)/twitter_rps_train.csv.gz -o predictor/trimtab_predictor/weights

.PHONY: bench-router
bench-router: venv ## measure the router against chained MLServers: overhead, throughput, large tensors, batching, overload
	$(PY) -m benchmarks.router

.PHONY: demo compare chaos profile
demo: venv ## serve the digits pipeline under a changing load for three minutes; report in out/demo.html
	.venv/bin/trimtab demo -o $(OUT)

compare: venv ## the same load against adaptation, the lightest and the heaviest variants
	.venv/bin/trimtab compare pipelines/digits -o $(OUT)

chaos: venv ## kill model servers and the adapter under load
	$(PY) -m benchmarks.chaos --out $(OUT)

profile: venv ## measure the digits pipeline on this machine
	.venv/bin/trimtab profile pipelines/digits
