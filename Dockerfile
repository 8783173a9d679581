# The daemon: docker run -e PARAPPLY_SOURCE__DSN=... -e PARAPPLY_TARGET__DSN=... parapply run --slot app --publication app
FROM python:3.11-slim-bookworm AS build
# They compile the hot path; the image itself holds the result, not the compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY src src
# What a checkout has compiled in place was made for its own Python and C library.
RUN find src -name '*.so' -delete && rm -f src/parapply/_compiled.json
# An image without the compiled hot path would work, and be slow, so it is an error here. pip is not needed afterwards.
RUN python -m venv /opt/parapply && \
    PARAPPLY_BUILD=require /opt/parapply/bin/pip install --no-cache-dir --no-compile -c constraints.txt . && \
    /opt/parapply/bin/pip uninstall --yes setuptools pip && \
    PARAPPLY_COMPILED=require /opt/parapply/bin/python -m parapply --version

FROM python:3.11-slim-bookworm
COPY --from=build /opt/parapply /opt/parapply
# Probes and Prometheus: the health check below asks there. Publish the port only where it may be read.
ENV PATH=/opt/parapply/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PARAPPLY_METRICS__LISTEN=:9717
EXPOSE 9717
# Where the apply log goes when PARAPPLY_APPLYLOG__DIRECTORY names it, and what is kept of transactions in progress.
RUN install -d -o nobody -g nogroup /var/log/parapply /var/lib/parapply
ENV PARAPPLY_APPLY__SPILL_DIR=/var/lib/parapply
VOLUME ["/var/log/parapply", "/var/lib/parapply"]
USER nobody
# Live, not ready: a daemon whose target is away is healthy and tries again.
HEALTHCHECK --interval=30s --timeout=5s --start-period=30s \
    CMD ["python", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:9717/healthz/live', timeout=4)"]
# docker stop sends SIGTERM: the daemon drains.
ENTRYPOINT ["parapply"]
CMD ["--help"]
