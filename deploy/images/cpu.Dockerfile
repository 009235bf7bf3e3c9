# Every role on CPUs, with the bundled pair: context is the repository. `make images` builds it, runs it and asks it.
#
#   docker build -f deploy/images/cpu.Dockerfile -t specdec-cpu:0.2.0 .
#   docker run --rm --read-only --tmpfs /tmp -v specdec-cache:/cache -p 8000:8000 specdec-cpu:0.2.0 --role fused_target --host 0.0.0.0 --http_port 8000
#
# BASE is a Debian with Python 3.11 and its venv; deploy/images/cpu.lock has the hashes of everything else.
# To keep to one build of it, write its digest behind the tag (@sha256:...), here and in cuda.Dockerfile. This prints it:
#
#   docker buildx imagetools inspect docker.io/library/python:3.11-slim-bookworm --format '{{.Manifest.Digest}}'
ARG BASE=docker.io/library/python:3.11-slim-bookworm

FROM ${BASE} AS packages
# Where torch without CUDA lies.
ARG PYTORCH=https://download.pytorch.org/whl/cpu/torch/
ARG LOCK=deploy/images/cpu.lock
COPY ${LOCK} /lock
RUN python3 -m venv /venv \
    && /venv/bin/python -m pip install --no-cache-dir --disable-pip-version-check --no-deps \
        --require-hashes --only-binary :all: --find-links "${PYTORCH}" --requirement /lock \
    && /venv/bin/python -m pip uninstall --yes --quiet pip \
    && rm -rf /venv/lib/python3.11/site-packages/torch/include # of those who compile against it

FROM ${BASE}
LABEL org.opencontainers.image.title="specdec" \
      org.opencontainers.image.description="Speculative decoding as a service, on CPUs, with a bundled pair" \
      org.opencontainers.image.licenses="MIT"
ENV PATH=/venv/bin:$PATH \
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
COPY prompts prompts
COPY models models
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
