# syntax=docker/dockerfile:1.7
#
# Two images from one wheel:
#   docker build --target agent -t lmcache-redis-agent:VERSION .
#   docker build --target vllm  -t lmcache-redis-vllm:VERSION  .
# docker-compose.yml and the chart in deploy/helm run them.

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
# The wheel was built from this checkout; its requirements have bounds.
# hadolint ignore=DL3013
RUN --mount=from=wheel,source=/dist,target=/dist \
    for wheel in /dist/*.whl; do pip install --no-cache-dir "${wheel}[seal]"; done
# One uid in both images: only its owner can enter the endpoint's directory, and only the same user
# can open an engine's memory (/proc/<pid>/fd). The directory exists here so that a new volume
# mounted on it takes over its owner and mode.
RUN useradd --uid 10001 --create-home lmcache \
    && install -d -o lmcache -g lmcache -m 0700 /run/lmcache-redis
# By number: Kubernetes' runAsNonRoot does not look up names.
USER 10001:10001
VOLUME /run/lmcache-redis
# With --metrics 0.0.0.0:9464.
EXPOSE 9464
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
USER 10001:10001
ENV HOME=/home/lmcache
EXPOSE 8000
# It loads the model first.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["python3", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); exit(c.getresponse().status != 200)"]
ENTRYPOINT ["vllm", "serve"]
