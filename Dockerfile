# Trains and serves on CPUs: docker run IMAGE train CONFIG, docker run IMAGE serve URL. docs/guide/deploy.md explains it.
# It has not been built yet.
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake ninja-build && rm -rf /var/lib/apt/lists/*
COPY . /persia
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /persia

FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# libgomp1: PyTorch's OpenMP. tini: passes signals on, which the first process of a container does not get by default.
# All versions are those of the tests. Of PyTorch's builds of a version, pip takes that of this index, as its name is longer.
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 tini && rm -rf /var/lib/apt/lists/* \
  && pip install --no-cache-dir --constraint /wheels/constraints.txt --extra-index-url "$TORCH_INDEX" \
    "$(ls /wheels/*.whl)[ray,serve,prometheus,kafka,s3]" \
  && rm -r /wheels && useradd --create-home --uid 1000 persia
USER 1000
WORKDIR /home/persia
ENTRYPOINT ["tini", "--", "persia"]
CMD ["--help"]
