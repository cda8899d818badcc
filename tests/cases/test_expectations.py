"""`Expect: 100-continue`: who waits for the 100 gets one or an answer, and nobody uploads what is refused."""

import ssl
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.processes import clean_environment
from tests.support.upstream import Behaviour, Request, Upstream, Wire, message, read_body
from tests.support.ways import Kind, Way

BODY = b"x" * (5 * 1024 * 1024)
STALL_SECONDS = 1.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
STORED = message(b"stored")


async def continues(request: Request, wire: Wire) -> None:
    await wire.write(CONTINUE)
    await read_body(request, wire)
    await wire.write(STORED)


async def refuses(_: Request, wire: Wire) -> None:
    await wire.write(message(b"who are you?", status="401 Unauthorized"))


async def ignores(request: Request, wire: Wire) -> None:
    await read_body(request, wire)
    await wire.write(STORED)


async def hints_first(request: Request, wire: Wire) -> None:
    await wire.write(b"HTTP/1.1 103 Early Hints\r\nLink: </a.css>; rel=preload\r\n\r\n")
    await continues(request, wire)


SERVERS: dict[str, tuple[Behaviour, int]] = {
    "says 100, then 200": (continues, 200),
    "says 401 at once": (refuses, 401),
    "ignores it": (ignores, 200),
    "says 103 first": (hints_first, 200),
}


def expecting(through: Way) -> bytes:
    return through.head("PUT", "/object", [("Content-Length", str(len(BODY))), ("Expect", "100-continue")])


@pytest.mark.parametrize("server", SERVERS)
def test_a_client_that_waits_for_the_100_without_end_gets_on(
    through: Way, upstream: Upstream, secret: str, server: str
) -> None:
    """Proxies dropped it, read it wrongly, or waited together with the client."""
    behaviour, status = SERVERS[server]
    upstream.on("/object", behaviour, before_body=True)

    with through.open() as line:
        began = time.monotonic()
        line.send(expecting(through))
        first = line.read_until(b"\r\n\r\n")
        if b" 103 " in first:
            first = line.read_until(b"\r\n\r\n")
        waited = time.monotonic() - began
        if status == 200:
            assert first == CONTINUE
            line.send(BODY)
            response = line.read_response(method="PUT", timeout_seconds=20)
            assert (response.status, response.body) == (200, b"stored")
        else:
            assert first.startswith(b"HTTP/1.1 401 ")

    [seen] = upstream.seen("/object")
    assert waited <= STALL_SECONDS
    assert seen.values("authorization") == [f"Bearer {secret}"]
    assert seen.values("expect") == ["100-continue"]
    assert seen.body == (BODY if status == 200 else b"")


@pytest.mark.needs("curl")
@pytest.mark.parametrize("server", SERVERS)
def test_curl_uploads_without_a_stall(
    through: Way, upstream: Upstream, secret: str, tmp_path: Path, server: str
) -> None:
    behaviour, status = SERVERS[server]
    upstream.on("/object", behaviour, before_body=True)
    (tmp_path / "body").write_bytes(BODY)
    if through.kind is Kind.TUNNEL:
        way = ["--proxy", through.proxy.forward_url(through.ticket), "--cacert", "ca.pem"]
        url = f"https://{through.authority}/object"
        through_ca(through, tmp_path / "ca.pem")
    else:
        way, url = [], f"{through.proxy.reverse_url(through.ticket, through.credential)}/object"

    began = time.monotonic()
    ran = subprocess.run(
        [
            *["curl", "-sS", "--noproxy", "", "--max-time", "20", "-T", "body", "-o", "said", "-w", "%{http_code}"],
            *["-H", "Expect: 100-continue", "-H", f"Authorization: Bearer {through.ticket.placeholder}", *way, url],
        ],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.monotonic() - began

    assert ran.stdout == str(status), ran.stderr
    assert took < STALL_SECONDS + 3  # for sending 5 MiB on a busy machine; a stall would be its time-out
    assert upstream.seen("/object")[0].values("authorization") == [f"Bearer {secret}"]
    assert secret not in (tmp_path / "said").read_text()


def through_ca(through: Way, file: Path) -> None:
    """curl wants it as a file."""
    authorities = through.context.get_ca_certs(binary_form=True)
    file.write_text("".join(ssl.DER_cert_to_PEM_cert(each) for each in authorities))
