# One image for every part; the part is the argument: `serve control-plane`, `serve proxy`, `serve runtime`.
#
# Python packages are locked by hash (requirements/run.txt). The image holds no compiler, no pip cache and no secret:
# secrets are files, mounted when it runs. It writes nothing: run it with a read-only root and a small /tmp.

FROM python:3.11-slim-bookworm AS build
WORKDIR /build
RUN python -m venv --without-pip /opt/coatcheck
COPY requirements/run.txt requirements/run.txt
RUN python -m pip --python /opt/coatcheck/bin/python install \
      --no-cache-dir --disable-pip-version-check --root-user-action=ignore --require-hashes --no-deps -r requirements/run.txt
COPY pyproject.toml README.md LICENSE ./
COPY control_plane control_plane
COPY egress_proxy egress_proxy
COPY runtime runtime
COPY coatcheck coatcheck
RUN python -m pip --python /opt/coatcheck/bin/python install \
      --no-cache-dir --disable-pip-version-check --root-user-action=ignore --no-deps --no-build-isolation . \
 && python -m compileall -q /opt/coatcheck/lib

FROM python:3.11-slim-bookworm
RUN groupadd --system --gid 10001 coatcheck \
 && useradd --system --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin coatcheck
COPY --from=build /opt/coatcheck /opt/coatcheck
ENV PATH=/opt/coatcheck/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
# By number, so that Kubernetes can tell that it is not root.
USER 10001:10001
EXPOSE 8470 8471 8472 8473 8474
# -I: nothing of PYTHON* variables or the current folder reaches a process that holds keys.
ENTRYPOINT ["python", "-I", "-m", "coatcheck"]
CMD ["--help"]
