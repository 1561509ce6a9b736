# syntax=docker/dockerfile:1
#
# Two images from one wheel:
#   docker build --target agent -t lmcache-redis-agent .
#   docker build --target vllm  -t lmcache-redis-vllm .
# docker-compose.yml builds and joins them.

ARG PYTHON_TAG=3.12-slim
ARG VLLM_TAG=latest

FROM python:${PYTHON_TAG} AS wheel
# For the native extension; one wheel serves every Python from 3.11 on.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py LICENSE *.md ./
COPY lmcache_redis lmcache_redis
RUN pip wheel --no-deps --no-cache-dir --wheel-dir /dist .


FROM python:${PYTHON_TAG} AS agent
# torch opens and copies the KV of GPU engines. An agent for CPU engines does not import it, and the
# image is far smaller without it: --build-arg EXTRAS=
ARG EXTRAS=[torch]
# Triton builds the copy kernels of GPU engines with a C compiler when the first engine registers.
RUN if [ -n "${EXTRAS}" ]; then \
        apt-get update \
        && apt-get install --yes --no-install-recommends gcc libc6-dev \
        && rm -rf /var/lib/apt/lists/*; \
    fi
RUN --mount=from=wheel,source=/dist,target=/dist \
    for wheel in /dist/*.whl; do pip install --no-cache-dir "${wheel}${EXTRAS}"; done
# One uid in both images: only its owner can enter the endpoint's directory, and only the same user
# can open an engine's memory (/proc/<pid>/fd). The directory exists here so that a new volume
# mounted on it takes over its owner and mode.
RUN useradd --uid 10001 --create-home lmcache \
    && install -d -o lmcache -g lmcache -m 0700 /run/lmcache-redis
USER lmcache
VOLUME /run/lmcache-redis
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s \
    CMD ["lmcache-redis", "ping", "--endpoint", "ipc:///run/lmcache-redis/agent.sock"]
ENTRYPOINT ["lmcache-redis"]
CMD ["agent", "--endpoint", "ipc:///run/lmcache-redis/agent.sock"]


FROM vllm/vllm-openai:${VLLM_TAG} AS vllm
# vLLM finds the connector through the entry point of the installed package.
RUN --mount=from=wheel,source=/dist,target=/dist \
    python3 -m pip install --no-cache-dir /dist/*.whl
RUN useradd --uid 10001 --create-home lmcache \
    && install -d -o lmcache -g lmcache -m 0700 /run/lmcache-redis \
    && install -d -o lmcache -g lmcache /home/lmcache/.cache/huggingface
USER lmcache
ENV HOME=/home/lmcache
ENTRYPOINT ["vllm", "serve"]
