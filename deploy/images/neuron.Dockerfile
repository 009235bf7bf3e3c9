# A server on AWS Trainium: context is the repository. BASE is AWS's container with NxD Inference; its SDK pins torch and
# Transformers, so that there is no lock: what it lacks is installed as requirements/neuron.txt says. The compiler stays.
#
#   docker build -f deploy/images/neuron.Dockerfile -t specdec-neuron:0.2.0 .
# By digest: NAME:TAG@sha256:..., as deploy/images/cpu.Dockerfile says.
ARG BASE=public.ecr.aws/neuron/pytorch-inference-neuronx:2.9.0-neuronx-py312-sdk2.29.1-ubuntu24.04
FROM ${BASE}
LABEL org.opencontainers.image.title="specdec" \
      org.opencontainers.image.description="Speculative decoding as a service, on AWS Trainium" \
      org.opencontainers.image.licenses="MIT"
ENV HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /app
COPY requirements/neuron.txt requirements/
# The packages of the SDK itself come with BASE, and must not be replaced.
ARG INSTALL="python3 -m pip install --no-cache-dir --disable-pip-version-check"
# Conflicts that BASE has of its own are not ours; a new one means that a package of the SDK was replaced.
RUN sed -n '/^# The runtime/,$p' requirements/neuron.txt > runtime.txt \
    && (python3 -m pip check > before || true) \
    && ${INSTALL} --requirement runtime.txt \
    && (python3 -m pip check > after || ! grep --invert-match --line-regexp --fixed-strings --file before after) \
    && rm before after
COPY main.py compare_architectures.py LICENSE ./
COPY specdec specdec
COPY scripts scripts
COPY configs configs
COPY prompts prompts
RUN python3 -m compileall -q specdec scripts && mkdir --mode=0700 /cache && chown 1000:1000 /cache
USER 1000:1000
VOLUME /cache
EXPOSE 8000 50051
STOPSIGNAL SIGTERM
# None, since ports are flags: compose and Kubernetes ask the port of --probe_port.
HEALTHCHECK NONE
ENTRYPOINT ["python3", "main.py"]
CMD ["--help"]
