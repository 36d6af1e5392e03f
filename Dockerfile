# Secateur on CPUs. Build: docker build -t secateur .
# Run in a folder of yours: docker run --rm --user "$(id -u):$(id -g)" -v "$PWD":/work secateur audit --predictions answers.npz
FROM python:3.12-slim
COPY pyproject.toml constraints.txt README.md LICENSE /src/
COPY src /src/src
# PyTorch's own index has the build for CPUs, a tenth of the size; of equal versions pip takes that one.
ARG EXTRAS=onnx,search,parquet
RUN pip install --no-cache-dir --disable-pip-version-check --extra-index-url https://download.pytorch.org/whl/cpu \
    -c /src/constraints.txt "/src[$EXTRAS]"
# One thread a process (a run sets its own), no GPU, and a home that any user may write to.
ENV OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 SECATEUR_DEVICE=cpu HOME=/tmp
WORKDIR /work
USER 1000:1000
ENTRYPOINT ["secateur"]
CMD ["--help"]
