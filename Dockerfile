# The daemon: docker run -e PARAPPLY_SOURCE__DSN=... -e PARAPPLY_TARGET__DSN=... parapply run --slot app --publication app
FROM python:3.11-slim-bookworm AS build
WORKDIR /build
COPY pyproject.toml constraints.txt hatch_build.py README.md LICENSE ./
COPY src src
RUN python -m venv /opt/parapply && /opt/parapply/bin/pip install --no-cache-dir -c constraints.txt .

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
