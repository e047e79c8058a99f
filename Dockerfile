# megamem for CPUs. docs/launching.md says how to build and run it; Dockerfile.cuda is for GPUs.
FROM python:3.11.14-slim-bookworm AS wheel
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir -c constraints.txt build setuptools \
    && python -m build --no-isolation --outdir /dist

FROM python:3.11.14-slim-bookworm
ARG EXTRAS=""
COPY constraints.txt /opt/megamem/
# the CPU build by its local version label, in a layer that changes only with the pins
RUN pip install --no-cache-dir -c /opt/megamem/constraints.txt --upgrade pip \
    && pip install --no-cache-dir -c /opt/megamem/constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu \
    "torch==$(sed -n 's/^torch==//p' /opt/megamem/constraints.txt)+cpu"
COPY --from=wheel /dist/*.whl /opt/megamem/
RUN pip install --no-cache-dir -c /opt/megamem/constraints.txt "$(ls /opt/megamem/*.whl)${EXTRAS:+[$EXTRAS]}" \
    && useradd --create-home --uid 1000 megamem \
    && install --directory --owner megamem /work
USER 1000
WORKDIR /work
ENTRYPOINT ["megamem"]
CMD ["--help"]
