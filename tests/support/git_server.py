"""A git server: smart HTTP over TLS by git's own `http-backend`, its token checked.

Rule: nothing is answered without the token, and a bare request is told 401 with a Basic challenge, which is how git
learns that it must authenticate (its first request never does). See git-http-backend(1), RFC 3875.
"""

import asyncio
import base64
import os
import subprocess
from pathlib import Path
from typing import Final

from tests.support.upstream import Request, Upstream, Wire, message

GIT_ENVIRONMENT: Final = {
    "PATH": os.environ["PATH"],
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_AUTHOR_NAME": "Coat",
    "GIT_AUTHOR_EMAIL": "coat@example.test",
    "GIT_COMMITTER_NAME": "Coat",
    "GIT_COMMITTER_EMAIL": "coat@example.test",
}
CHALLENGE: Final = [("WWW-Authenticate", 'Basic realm="git"')]


def git(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run git with none of this machine's settings. Raises `CalledProcessError`."""
    return subprocess.run(
        ["git", *arguments],
        cwd=cwd,
        env=GIT_ENVIRONMENT | {"HOME": str(cwd)} | environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )


def create_repository(folder: Path, name: str = "coats.git") -> Path:
    """A bare repository with one commit on `main`, open for pushes."""
    bare, work = folder / name, folder / "seed"
    git("init", "--bare", "--initial-branch=main", str(bare), cwd=folder)
    git("config", "http.receivepack", "true", cwd=bare)
    git("init", "--initial-branch=main", str(work), cwd=folder)
    (work / "README").write_text("one coat\n")
    git("add", ".", cwd=work)
    git("commit", "-m", "One coat", cwd=work)
    git("push", str(bare), "main", cwd=work)
    return bare


def serve_git(upstream: Upstream, folder: Path, *, user: str, token: str) -> None:
    """Let this upstream serve the repositories in `folder` to whoever knows the token."""
    expected = "Basic " + base64.b64encode(f"{user}:{token}".encode()).decode()

    async def behave(request: Request, wire: Wire) -> None:
        if request.header("authorization") != expected:
            await wire.write(message(b"who are you?", status="401 Unauthorized", headers=CHALLENGE))
            return
        await wire.write(await _backend(folder, request, user))

    upstream.default = behave


async def _backend(folder: Path, request: Request, user: str) -> bytes:
    environment = GIT_ENVIRONMENT | {
        "GIT_PROJECT_ROOT": str(folder),
        "GIT_HTTP_EXPORT_ALL": "1",
        "PATH_INFO": request.path,
        "QUERY_STRING": request.query,
        "REQUEST_METHOD": request.method,
        "REMOTE_USER": user,
        "REMOTE_ADDR": "127.0.0.1",
        "CONTENT_TYPE": request.header("content-type"),
        "CONTENT_LENGTH": str(len(request.body)),
        "HTTP_CONTENT_ENCODING": request.header("content-encoding"),
        "GIT_PROTOCOL": request.header("git-protocol"),
    }
    process = await asyncio.create_subprocess_exec(
        "git", "http-backend", env=environment, cwd=folder,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    output, _ = await process.communicate(request.body)
    head, _, body = output.partition(b"\r\n\r\n")
    pairs = [(name, value.strip()) for name, _, value in (line.partition(":") for line in head.decode().splitlines())]
    status = next((value for name, value in pairs if name.lower() == "status"), "200 OK")
    return message(body, status=status, headers=[pair for pair in pairs if pair[0].lower() != "status"])
