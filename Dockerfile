# The daemon: docker run -e PARAPPLY_SOURCE__DSN=... -e PARAPPLY_TARGET__DSN=... parapply run --slot app --publication app
FROM python:3.11-slim-bookworm AS build
# They compile the hot path; the image itself holds the result, not the compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY src src
# What a checkout has compiled in place was made for its own Python and C library.
RUN find src -name '*.so' -delete && rm -f src/parapply/_compiled.json
# An image without the compiled hot path would work, and be slow: it is an error here.
RUN python -m venv /opt/parapply && \
    PARAPPLY_BUILD=require /opt/parapply/bin/pip install --no-cache-dir -c constraints.txt . && \
    PARAPPLY_COMPILED=require /opt/parapply/bin/parapply --version

FROM python:3.11-slim-bookworm
COPY --from=build /opt/parapply /opt/parapply
ENV PATH=/opt/parapply/bin:$PATH PYTHONUNBUFFERED=1
# Where the apply log goes when PARAPPLY_APPLYLOG__DIRECTORY names it.
RUN install -d -o nobody -g nogroup /var/log/parapply
VOLUME /var/log/parapply
USER nobody
# docker stop sends SIGTERM: the daemon drains.
ENTRYPOINT ["parapply"]
CMD ["--help"]
