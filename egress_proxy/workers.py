"""Several workers: one process each, on the same ports (`SO_REUSEPORT`), and one that supervises them.

Every worker has its own cache, pool and spool; they share nothing but the ports. The supervisor holds no secret and
serves no client: it keeps the ports, starts a worker again that died, passes SIGTERM on, and answers the operators'
listener for all: ready when every worker is, counts summed.
"""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from http import HTTPStatus
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

import structlog
from prometheus_client.parser import text_string_to_metric_families

from egress_proxy.addresses import OwnListeners
from egress_proxy.admin import Page, Pages, serve_pages
from egress_proxy.bootstrap import (
    Sockets,
    collect_garbage_seldom,
    listen_admin,
    log_listening,
    open_sockets,
    until_told_to_stop,
    worker,
)
from egress_proxy.ca import UnusableCaError
from egress_proxy.config import Settings
from egress_proxy.hardening import forbid_core_dumps, keep_files_private
from egress_proxy.listen import ListenAddress
from egress_proxy.logs import log_loop_errors, log_to_stderr, place_of
from egress_proxy.metrics import CERTIFICATE_SECONDS
from egress_proxy.server import open_socket

RESTART_SECONDS: Final = 1.0
ASK_SECONDS: Final = 3.0
STOP_SECONDS: Final = 10.0

log = structlog.get_logger("egress_proxy")


async def supervise(settings: Settings) -> None:
    """Run `settings.workers` workers until SIGTERM or SIGINT."""
    # Bound here and not listened on: it reserves the ports, and port 0 is the same for every worker.
    sockets = open_sockets(settings, is_shared=True)
    forward_port, reverse_port = sockets.forward.getsockname()[1], sockets.reverse.getsockname()[1]
    admin_socket = open_socket(settings.admin_listen, is_shared=False)
    admin_port = int(admin_socket.getsockname()[1])
    fixed = settings.model_copy(
        update={
            "forward_listen": ListenAddress(settings.forward_listen.host, forward_port),
            "reverse_listen": ListenAddress(settings.reverse_listen.host, reverse_port),
            "admin_listen": ListenAddress(settings.admin_listen.host, admin_port),
        }
    )
    with tempfile.TemporaryDirectory(prefix="coatcheck-proxy-") as folder:  # mode 0700
        crew = _Crew(fixed, Path(folder))
        async with crew.at_work():
            admin = await listen_admin(admin_socket, crew.pages(), OwnListeners())
            await crew.until_listening()
            minding = asyncio.create_task(crew.restart_the_dead())
            log_listening(forward_port, reverse_port, admin_port)
            await until_told_to_stop(crew.drain)
            minding.cancel()
            admin.close()


class _Crew:
    """The worker processes."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._settings = settings
        self._folder = folder
        self._spawn = multiprocessing.get_context("spawn")
        self._processes: dict[int, BaseProcess] = {}
        self._is_stopping = False

    @contextlib.asynccontextmanager
    async def at_work(self) -> AsyncIterator[None]:
        for number in range(self._settings.workers):
            self._start(number)
        try:
            yield
        finally:
            self._is_stopping = True
            await self._end()

    async def until_listening(self) -> None:
        """Raises `RuntimeError` if one of them does not even start."""
        while not all(self._path(number).exists() for number in self._processes):
            if not all(process.is_alive() for process in self._processes.values()):
                raise RuntimeError("a worker could not start; its own log line says why")
            await asyncio.sleep(0.02)

    async def drain(self) -> None:
        self._is_stopping = True
        for process in self._processes.values():
            _signal(process)
        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, process.join) for process in self._processes.values()))

    def pages(self) -> Pages:
        return {"/healthz": self._healthz, "/readyz": self._readyz, "/metrics": self._metrics}

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.sock"

    def _start(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        process = self._spawn.Process(
            target=run_worker, args=(self._settings, str(self._path(number))), name=f"worker-{number}"
        )
        process.start()
        self._processes[number] = process

    async def restart_the_dead(self) -> None:
        while not self._is_stopping:
            await asyncio.sleep(RESTART_SECONDS)
            for number, process in list(self._processes.items()):
                if not process.is_alive() and not self._is_stopping:
                    log.error("worker_died", worker=number, exit_code=process.exitcode)
                    self._start(number)

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        for process in self._processes.values():
            _signal(process)
        for process in self._processes.values():
            await loop.run_in_executor(None, process.join, STOP_SECONDS)
            if process.is_alive():
                process.kill()

    # --- the operators' listener, for all ---

    async def _healthz(self) -> Page:
        return Page(HTTPStatus.OK, b"alive\n")

    async def _readyz(self) -> Page:
        if self._is_stopping:
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"not ready\n")
        answers = await asyncio.gather(*(self._ask(number, "/readyz") for number in self._processes))
        return next((page for page in answers if page.status != HTTPStatus.OK), answers[0])

    async def _metrics(self) -> Page:
        answers = await asyncio.gather(*(self._ask(number, "/metrics") for number in self._processes))
        text = summed([page.body.decode() for page in answers if page.status == HTTPStatus.OK])
        return Page(HTTPStatus.OK, text.encode(), "text/plain; version=0.0.4; charset=utf-8")

    async def _ask(self, number: int, path: str) -> Page:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path(number))
                writer.write(f"GET {path} HTTP/1.1\r\nHost: worker\r\n\r\n".encode())
                head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
                writer.close()
                return Page(int(head.split(b" ", 2)[1]), body)
        except (OSError, TimeoutError, IndexError, ValueError):
            return Page(HTTPStatus.SERVICE_UNAVAILABLE, b"a worker does not answer\n")


def run_worker(settings: Settings, admin_path: str) -> None:
    """The whole life of a worker process."""
    import uvloop

    try:
        uvloop.run(_work(settings, admin_path))
    except UnusableCaError as error:
        log.error("worker_failed", reason=str(error))  # noqa: TRY400 - a traceback is what it must not print
        sys.exit(1)
    except Exception as error:  # border: a traceback would show messages, which may quote what was being handled
        log.error("worker_failed", error=type(error).__name__, where=place_of(error))  # noqa: TRY400 - as above
        sys.exit(1)


async def _work(settings: Settings, admin_path: str) -> None:
    log_to_stderr(settings.log_level)
    log_loop_errors(asyncio.get_running_loop())
    forbid_core_dumps()
    keep_files_private()
    sockets: Sockets = open_sockets(settings, is_shared=True)
    async with worker(settings, sockets) as (server, pages):
        admin_host, admin_port = settings.admin_listen.host, settings.admin_listen.port
        server.own.add(admin_host if admin_host != "localhost" else "127.0.0.1", admin_port)
        collect_garbage_seldom()
        admin = await asyncio.start_unix_server(
            lambda reader, writer: serve_pages(reader, writer, pages), path=admin_path
        )
        await until_told_to_stop(lambda: server.drain(settings.drain_grace_seconds))
        admin.close()


def summed(texts: list[str]) -> str:
    """Prometheus texts of several workers as one: samples of the same name and labels added up."""
    totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = defaultdict(float)
    heads: dict[str, str] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                heads.setdefault(
                    sample.name, f"# HELP {sample.name} {family.documentation}\n# TYPE {sample.name} {family.type}\n"
                )
                key = sample.name, tuple(sorted(sample.labels.items()))
                if sample.name.endswith(CERTIFICATE_SECONDS):  # the same certificate in each
                    totals[key] = min(totals.get(key, sample.value), sample.value)
                else:
                    totals[key] += sample.value
    lines, shown = [], set()
    for (name, labels), value in sorted(totals.items()):
        if name not in shown:
            shown.add(name)
            lines.append(heads[name])
        inner = ",".join(f'{key}="{text}"' for key, text in labels)
        lines.append(f"{name}{{{inner}}} {value}\n" if inner else f"{name} {value}\n")
    return "".join(lines)


def _signal(process: BaseProcess) -> None:
    if process.pid is not None and process.is_alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)
