# Millrace in a container.
#   docker build -t millrace .                                   on a CPU
#   docker build -t millrace --build-arg TORCH_BACKEND=cu128 .   on NVIDIA GPUs, with `docker run --gpus all`
#   docker run --rm --init -v "$PWD:/work" --user "$(id -u)" millrace train run.toml
# Published weights are in memory that has no file (memfd): they count for --memory, and --shm-size does not matter.
FROM python:3.12-slim

ARG TORCH_BACKEND=cpu
ENV PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1

RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --torch-backend="$TORCH_BACKEND" 'torch>=2.11,<2.16'

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN uv pip install --system --no-cache --torch-backend="$TORCH_BACKEND" '/src[all,prometheus]' \
    && useradd --create-home --uid 1000 millrace

USER millrace
WORKDIR /work
ENTRYPOINT ["millrace"]
CMD ["--help"]
