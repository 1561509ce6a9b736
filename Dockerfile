# syntax=docker/dockerfile:1.7
#
# Two images from one wheel:
#   docker build --target agent -t lmcache-redis-agent:VERSION --build-arg REVISION=$(git rev-parse HEAD) .
#   docker build --target vllm  -t lmcache-redis-vllm:VERSION  --build-arg REVISION=$(git rev-parse HEAD) .
# docker-compose.yml and the chart in deploy/helm run them.
#
# deploy/constraints.txt has the versions of what pip installs. To write it again:
#   uv pip compile pyproject.toml --extra seal --python-version 3.12 --no-header --no-annotate \
#     --python-platform x86_64-manylinux_2_28 --upgrade -o deploy/constraints.txt

ARG VERSION=0.2.0.dev0
ARG REVISION=unknown
ARG PYTHON_TAG=3.12.12-slim-bookworm
ARG VLLM_TAG=v0.32.0

FROM python:${PYTHON_TAG} AS wheel
# For the native extension; one wheel serves every Python from 3.11 on. The GPU kernels are compiled
# by Triton, which pip fetches for this stage alone.
# Debian's security updates replace versions: they are not pinned.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py LICENSE *.md ./
COPY lmcache_redis lmcache_redis
RUN pip wheel --no-deps --no-cache-dir --wheel-dir /dist . \
    # What is compiled is optional for those who have no compiler. Here it is not.
    && python -c "import glob, zipfile; names = zipfile.ZipFile(*glob.glob('/dist/*.whl')).namelist(); \
assert sum(name.endswith(('.abi3.so', '.ptx')) for name in names) == 2 + 10, names"


FROM python:${PYTHON_TAG} AS agent
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="lmcache-redis agent" \
      org.opencontainers.image.description="The agent of a KV cache for vLLM in Redis or Valkey" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# hadolint ignore=DL3013
RUN --mount=from=wheel,source=/dist,target=/dist \
    --mount=source=deploy/constraints.txt,target=/constraints.txt \
    for wheel in /dist/*.whl; do \
        pip install --no-cache-dir --constraint /constraints.txt "${wheel}[seal]"; \
    done
# One uid in both images: only its owner can enter the endpoint's directory, and only the same user
# can open an engine's memory (/proc/<pid>/fd). The directory exists here so that a new volume
# mounted on it takes over its owner and mode.
RUN useradd --uid 10001 --create-home lmcache \
    && install -d -o lmcache -g lmcache -m 0700 /run/lmcache-redis
# By number: Kubernetes' runAsNonRoot does not look up names.
USER 10001:10001
VOLUME /run/lmcache-redis
# For the agent, and for commands that are run beside it.
ENV LMCACHE_REDIS_ENDPOINT=ipc:///run/lmcache-redis/agent.sock
# With --metrics 0.0.0.0:9464.
EXPOSE 9464
# By the shell alone: a Python would take 0.3 s of a processor each time.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9464; printf 'GET /healthz HTTP/1.0\\r\\n\\r\\n' >&3; read -r _ status _ <&3; [ \"$status\" = 200 ]"]
ENTRYPOINT ["lmcache-redis"]
CMD ["agent", "--metrics", "127.0.0.1:9464"]


FROM vllm/vllm-openai:${VLLM_TAG} AS vllm
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="vLLM with lmcache-redis" \
      org.opencontainers.image.description="vLLM with a KV cache in Redis or Valkey" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
# vLLM finds the connector through the entry point of the installed package. What both need keeps
# the version that vLLM has.
RUN --mount=from=wheel,source=/dist,target=/dist \
    --mount=source=deploy/constraints.txt,target=/constraints.txt \
    grep -E '^(hiredis|redis|xxhash)==' /constraints.txt >/tmp/constraints.txt \
    && python3 -m pip install --no-cache-dir --constraint /tmp/constraints.txt /dist/*.whl
# Models and compiled kernels are in .cache: one volume keeps both.
RUN useradd --uid 10001 --create-home lmcache \
    && install -d -o lmcache -g lmcache -m 0700 /run/lmcache-redis \
    && install -d -o lmcache -g lmcache /home/lmcache/.cache
USER 10001:10001
ENV HOME=/home/lmcache \
    TRITON_CACHE_DIR=/home/lmcache/.cache/triton
EXPOSE 8000
# It loads the model first.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000; printf 'GET /health HTTP/1.0\\r\\n\\r\\n' >&3; read -r _ status _ <&3; [ \"$status\" = 200 ]"]
ENTRYPOINT ["vllm", "serve"]
