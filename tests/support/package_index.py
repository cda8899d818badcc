"""Package indexes that want a token for everything: one for pip (PEP 503), one for npm.

Rule: nothing is answered without the token, packages included; and what is not a package's own bytes quotes the token
back, as pages of a misconfigured server do.
"""

import base64
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from typing import Final

from tests.support.upstream import Behaviour, Request, Upstream, Wire, message

PIP_USER: Final = "__token__"
PIP_PACKAGE: Final = "coats-hook"
NPM_PACKAGE: Final = "@coats/hook"
"""With a scope: npm asks for it as one segment, `@coats%2fhook`."""

Page = tuple[str, bytes]
"""Content-Type and body."""


def serve_pip_index(upstream: Upstream, *, token: str) -> None:
    """A simple index under `/simple/`, for Basic credentials."""
    wheel, file = _wheel(), "coats_hook-1.0-py3-none-any.whl"
    links = f'<!DOCTYPE html><!-- {token} --><a href="../../files/{file}">{file}</a>'
    pages = {
        f"/simple/{PIP_PACKAGE}/": ("text/html", links.encode()),
        f"/files/{file}": ("application/octet-stream", wheel),
    }
    expected = f"Basic {base64.b64encode(f'{PIP_USER}:{token}'.encode()).decode()}"
    upstream.default = _serving(lambda _: pages, expected=expected, challenge='Basic realm="index"')


def serve_npm_registry(upstream: Upstream, *, token: str) -> None:
    """One scoped package, for a bearer token. Its tarball's address is a whole URL, as registries give it."""
    tarball = _tarball()

    def pages(url: str) -> Mapping[str, Page]:
        version = {
            "name": NPM_PACKAGE,
            "version": "1.0.0",
            "dist": {
                "tarball": f"{url}/@coats/hook/-/hook-1.0.0.tgz",
                "integrity": f"sha512-{base64.b64encode(hashlib.sha512(tarball).digest()).decode()}",
            },
        }
        packument = {
            "name": NPM_PACKAGE,
            "readme": token,
            "dist-tags": {"latest": "1.0.0"},
            "versions": {"1.0.0": version},
        }
        return {
            "/@coats%2fhook": ("application/json", json.dumps(packument).encode()),
            "/@coats/hook/-/hook-1.0.0.tgz": ("application/octet-stream", tarball),
        }

    upstream.default = _serving(
        pages, expected=f"Bearer {token}", challenge='Bearer realm="registry"', url=upstream.url
    )


def _serving(pages: Callable[[str], Mapping[str, Page]], *, expected: str, challenge: str, url: str = "") -> Behaviour:
    async def behave(request: Request, wire: Wire) -> None:
        if request.header("authorization") != expected:
            headers = [("WWW-Authenticate", challenge)]
            await wire.write(message(b"who are you?", status="401 Unauthorized", headers=headers))
            return
        kind, body = pages(url).get(request.path, ("", b""))
        status = "200 OK" if kind else "404 Not Found"
        await wire.write(message(body, status=status, headers=[("Content-Type", kind or "text/plain")]))

    return behave


def _wheel() -> bytes:
    about = "coats_hook-1.0.dist-info"
    files = {
        "coats_hook.py": "HANGS = True\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {PIP_PACKAGE}\nVersion: 1.0\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: coats\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{about}/RECORD"] = "".join(f"{name},,\n" for name in (*files, f"{about}/RECORD"))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


def _tarball() -> bytes:
    files = {
        "package/package.json": json.dumps({"name": NPM_PACKAGE, "version": "1.0.0", "main": "hook.js"}),
        "package/hook.js": "module.exports = { hangs: true };\n",
    }
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    return packed.getvalue()
