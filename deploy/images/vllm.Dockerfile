# A target over vLLM on NVIDIA GPUs: context is the repository. BASE is vLLM's own container, none of whose packages is
# replaced: what it lacks is installed as pyproject.toml says. Its version is one that docs/vllm.md names.
#
#   docker build -f deploy/images/vllm.Dockerfile -t specdec-vllm:0.2.0 .
# By digest: NAME:TAG@sha256:..., as deploy/images/cpu.Dockerfile says.
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0
FROM ${BASE}
LABEL org.opencontainers.image.title="specdec" \
      org.opencontainers.image.description="Speculative decoding as a service, over vLLM" \
      org.opencontainers.image.licenses="MIT"
# vLLM, Triton and torch keep what they compile below HOME; torch asks for the user's name, which a number lacks.
ENV HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/cache/inductor \
    LOGNAME=specdec \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /app
# The constraints keep BASE's own versions: a package of ours that does not fit them ends the build.
ARG INSTALL="python3 -m pip install --no-cache-dir --disable-pip-version-check --constraint kept.txt"
COPY pyproject.toml ./
COPY vllm_same_text vllm_same_text
RUN python3 -c "import importlib.metadata as m; print(*{f'{d.name}=={d.version}' for d in m.distributions()}, sep='\n')" > kept.txt \
    && python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > runtime.txt \
    && ${INSTALL} --requirement runtime.txt ./vllm_same_text \
    && rm kept.txt
COPY main.py LICENSE ./
COPY specdec specdec
RUN python3 -m compileall -q specdec && mkdir --mode=0700 /cache && chown 1000:1000 /cache
USER 1000:1000
VOLUME /cache
EXPOSE 8000 50051
STOPSIGNAL SIGTERM
# None, since ports are flags: compose and Kubernetes ask the port of --probe_port.
HEALTHCHECK NONE
ENTRYPOINT ["python3", "main.py"]
CMD ["--help"]
