# Every role on NVIDIA GPUs: context is the repository. torch from PyPI brings the CUDA libraries, the host its driver.
# Once a GPU has run vllm.Dockerfile's targets, this is for draft workers alone: CUDA targets of our torch backend go.
#
#   docker build -f deploy/images/cuda.Dockerfile -t specdec-cuda:0.2.0 .
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS packages
ARG LOCK=deploy/images/cuda.lock
COPY ${LOCK} /lock
RUN python3 -m venv /venv \
    && /venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps \
        --require-hashes --only-binary :all: --requirement /lock \
    && /venv/bin/python -m pip uninstall --yes --quiet pip \
    && rm -rf /venv/lib/python3.11/site-packages/torch/include # of those who compile against it

FROM ${BASE}
LABEL org.opencontainers.image.title="specdec" \
      org.opencontainers.image.description="Speculative decoding as a service, on NVIDIA GPUs" \
      org.opencontainers.image.licenses="MIT"
ENV PATH=/venv/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
COPY --from=packages /venv /venv
WORKDIR /app
COPY main.py compare_architectures.py LICENSE ./
COPY specdec specdec
COPY scripts scripts
COPY configs configs
# Byte code for a root that nobody may write to: without it every start would compile everything again.
RUN python3 -m compileall -q specdec scripts && mkdir --mode=0700 /cache && chown 1000:1000 /cache
# No name is needed for it: a number is what Kubernetes compares with runAsNonRoot.
USER 1000:1000
VOLUME /cache
EXPOSE 8000 50051
STOPSIGNAL SIGTERM
# None, since ports are flags: compose and Kubernetes ask the port of --probe_port.
HEALTHCHECK NONE
ENTRYPOINT ["python3", "main.py"]
CMD ["--help"]
