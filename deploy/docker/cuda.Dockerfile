# One image for every process of a cluster, on NVIDIA GPUs and on CPUs. From the repository's root:
#
#   docker build -f deploy/docker/cuda.Dockerfile -t diptych:cuda .
#
# It differs from the Dockerfile beside it in what it is made of, not in how: the base, the lock, whose torch brings the
# CUDA libraries along, and the compiler, which stays in it, because Triton compiles on the machine that runs its kernels.
#
# BASE   Ubuntu 24.04 or another system with Python 3.12, pinned by digest
# LOCK   what is installed, each package with its hash; `make locks` makes it anew
# PIP    more options for pip
ARG BASE=docker.io/nvidia/cuda:13.0.1-base-ubuntu24.04@sha256:f8ef28f579ea42a44b415d2c5d46f788e6a9b395c6c83f2929416e1fc192c143
FROM ${BASE} AS build

# g++: compiles the CPU kernels.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/diptych && python3 -m venv /opt/sbom

ARG LOCK=cuda.lock
ARG PIP=""
COPY deploy/docker/${LOCK} deploy/docker/sbom.lock /locks/
RUN /opt/sbom/bin/pip install --no-cache-dir --require-hashes ${PIP} -r /locks/sbom.lock \
    && /opt/diptych/bin/pip install --no-cache-dir --require-hashes ${PIP} -r /locks/${LOCK}

WORKDIR /usr/src/diptych
COPY pyproject.toml setup.py README.md LICENSE __init__.py py.typed ./
COPY cluster cluster
COPY workers workers
COPY kernels kernels
COPY proto proto
COPY examples examples
# All that it needs is there already, its build tools too. Without compiled kernels there is no image.
RUN /opt/diptych/bin/pip install --no-cache-dir --no-deps --no-build-isolation --no-index . \
    && /opt/diptych/bin/pip check \
    && cd / && /opt/diptych/bin/python -c "from diptych.kernels.cpu.load import library; assert library(), 'no kernels'" \
    && /opt/sbom/bin/cyclonedx-py environment --output-reproducible --output-file /opt/diptych/sbom.cdx.json /opt/diptych

FROM ${BASE}

# tini: passes signals on, and buries orphans. g++ and the headers: for Triton.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates g++ python3 python3-dev tini \
    && rm -rf /var/lib/apt/lists/*

# A login shell resets PATH, and Kubernetes operators use one: hence the links.
RUN ln -s /opt/diptych/bin/diptych /opt/diptych/bin/ray /usr/local/bin/ \
    && useradd --create-home --uid 10001 diptych
COPY --from=build /opt/diptych /opt/diptych

# Read by Ray's own processes when they start, wherever `ray start` runs: no reports to Ray's makers; actors at normal
# priority; an actor without a GPU of its own may still see what there is.
ENV PATH=/opt/diptych/bin:$PATH \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_worker_niceness=0 \
    RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PYTHONUNBUFFERED=1

USER 10001
WORKDIR /home/diptych
EXPOSE 8000 50051
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "diptych"]
CMD ["serve", "tiny", "--host", "0.0.0.0"]
