# syntax=docker/dockerfile:1
# The service as an image. It needs BuildKit, and on a GPU host NVIDIA's container toolkit.
#
#   docker build -t patchgrid .                            attention by torch's own variable-length kernels
#   docker build -t patchgrid --build-arg FLASH_ATTN=1 .   and by flash-attn, compiled here (x86-64; long, and hungry for memory)
#   docker build -t patchgrid:cpu --build-arg PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu .
#
# The base is plain Python on Debian 12, what the tests run on, and not an nvidia/cuda image: torch's wheels bring their own
# CUDA 13 libraries and the container toolkit brings the driver, so such a base would only hold those libraries once more.

ARG PYTHON_VERSION=3.11
ARG FLASH_ATTN=0

FROM python:${PYTHON_VERSION}-slim-bookworm AS base
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PYTHONUNBUFFERED=1

# A stage of its own: the large layer below depends on the list of dependencies, not on all of pyproject.toml.
FROM base AS requirements
COPY pyproject.toml ./
RUN python -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" \
    > /requirements.txt

# setuptools too: torch asks for it, and the wheels below are built with the one that constraints.txt names.
FROM base AS dependencies
ARG PIP_EXTRA_INDEX_URL=""
COPY constraints.txt /constraints.txt
COPY --from=requirements /requirements.txt /requirements.txt
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c /constraints.txt -r /requirements.txt setuptools

FROM dependencies AS flash-attn-0
RUN mkdir /wheels

# NVIDIA's compiler for this Debian, so that the extension meets the interpreter, the torch and the C++ library that it will
# run with. CUDA's version is that of torch's wheels; torch refuses another major one.
FROM dependencies AS flash-attn-1
ARG CUDA_VERSION=13-0
ADD https://developer.download.nvidia.com/compute/cuda/repos/debian12/x86_64/cuda-keyring_1.1-1_all.deb /tmp/cuda-keyring.deb
RUN dpkg -i /tmp/cuda-keyring.deb \
    && apt-get update \
    && apt-get install -y --no-install-recommends \
        g++ cuda-minimal-build-${CUDA_VERSION} cuda-libraries-dev-${CUDA_VERSION} \
    && rm -rf /var/lib/apt/lists/*
ARG FLASH_ATTN_CUDA_ARCHS="80;90;100;120"
ARG MAX_JOBS=4
ENV CUDA_HOME=/usr/local/cuda
RUN --mount=type=cache,target=/root/.cache/pip \
    pip install -c /constraints.txt ninja psutil wheel \
    && FLASH_ATTENTION_FORCE_BUILD=TRUE \
        pip wheel --no-cache-dir --no-deps --no-build-isolation -c /constraints.txt -w /wheels flash-attn

FROM flash-attn-${FLASH_ATTN} AS flash-attn

FROM dependencies AS project
WORKDIR /project
COPY pyproject.toml README.md LICENSE ./
COPY encoder encoder
COPY distributed distributed
COPY service service
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation -w /wheels .

FROM dependencies AS service
RUN useradd --uid 10001 --create-home patchgrid \
    && install -d -o patchgrid -g patchgrid /var/cache/huggingface
RUN --mount=type=bind,from=flash-attn,source=/wheels,target=/wheels \
    if ls /wheels/*.whl 2>/dev/null; then pip install --no-cache-dir -c /constraints.txt /wheels/*.whl; fi
RUN --mount=type=bind,from=project,source=/wheels,target=/wheels \
    pip install --no-cache-dir --no-deps /wheels/*.whl

LABEL org.opencontainers.image.title="patchgrid" \
      org.opencontainers.image.description="Multi-GPU vision-encoder inference service for the DeepSeek-V4 / V4.1 vision tower" \
      org.opencontainers.image.version="0.1.0" \
      org.opencontainers.image.licenses="Apache-2.0"

ENV PATCHGRID_HOST=0.0.0.0 \
    PATCHGRID_PORT=8100 \
    HF_HOME=/var/cache/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER patchgrid
WORKDIR /home/patchgrid
VOLUME /var/cache/huggingface
EXPOSE 8100

# Ready, not live: what waits for this container or routes to it wants answers, and Docker itself ends nothing for being
# unhealthy. Where something does (Swarm, autoheal), probe /health/live: a group that restarts mends itself. The start period
# is startup_timeout_s, and the port is read from the environment: change it there, not by --port.
HEALTHCHECK --interval=10s --timeout=5s --start-period=900s --start-interval=2s --retries=3 \
    CMD ["python", "-c", "import http.client, os, sys; c = http.client.HTTPConnection('127.0.0.1', int(os.environ['PATCHGRID_PORT']), timeout=4); c.request('GET', '/health/ready'); sys.exit(c.getresponse().status != 200)"]

STOPSIGNAL SIGTERM
ENTRYPOINT ["patchgrid"]
CMD ["serve"]
