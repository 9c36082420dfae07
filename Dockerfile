# Trains and serves on CPUs: docker run IMAGE train CONFIG, docker run IMAGE serve URL. docs/guide/deploy.md explains it.
# It has not been built yet.
FROM python:3.12-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++ cmake ninja-build && rm -rf /var/lib/apt/lists/*
COPY . /persia
RUN pip wheel --no-deps --wheel-dir /wheels /persia

FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# libgomp1: PyTorch's OpenMP. PyTorch comes first, from its own index: else pip takes the build for CUDA.
RUN apt-get update && apt-get install -y --no-install-recommends libgomp1 && rm -rf /var/lib/apt/lists/* \
  && pip install --no-cache-dir torch --index-url "$TORCH_INDEX"
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(ls /wheels/*.whl)[ray,serve,prometheus,kafka,s3]" && rm -r /wheels \
  && useradd --create-home --uid 1000 persia
USER persia
WORKDIR /home/persia
ENTRYPOINT ["persia"]
CMD ["--help"]
