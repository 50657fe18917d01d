# One image for one kind of device:   docker build --build-arg DEVICE=cpu|cuda|tpu -t oct:cpu .
# docs/guides/pretraining.md says how to run it. Data, stores and runs stay outside: .dockerignore keeps them out.
ARG PYTHON=3.11
FROM python:${PYTHON}-slim-bookworm
ARG DEVICE=cpu
LABEL org.opencontainers.image.licenses="Apache-2.0"
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /opt/oct
# the packages first: a change of the code does not install them anew
COPY requirements.txt requirements-tpu.txt constraints.txt constraints-tpu.txt ./
# cpu: torch without CUDA's libraries, of the same version; cuda: PyPI's wheels, which bring them
RUN case "${DEVICE}" in \
        cpu) pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu \
                 "$(grep '^torch==' constraints.txt)" \
             && pip install --no-cache-dir -r requirements.txt -c constraints.txt ;; \
        cuda) pip install --no-cache-dir -r requirements.txt -c constraints.txt ;; \
        tpu) pip install --no-cache-dir -r requirements-tpu.txt -c constraints-tpu.txt ;; \
        *) echo "DEVICE: expected cpu, cuda or tpu, found ${DEVICE}" >&2; exit 2 ;; \
    esac
COPY . .
RUN useradd --create-home --uid 1000 oct \
    && mkdir /work \
    && chown oct /work
# last, or every commit would install the packages anew; the banner and provenance.json say it, without git
ARG COMMIT=""
LABEL org.opencontainers.image.revision="${COMMIT}"
ENV OCT_COMMIT="${COMMIT}"
USER 1000
# runs/ and relative paths of data belong to the folder that is mounted here
WORKDIR /work
# `python -m` takes the modules of /opt/oct, and none of a file of the mounted folder that has their name
ENV PYTHONPATH=/opt/oct PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 MPLCONFIGDIR=/tmp/matplotlib
CMD ["python", "-m", "utils.doctor"]
