"""The one outbound client (`ports.Outbound`): everything the control plane fetches goes through here (ADR 0010).

Rule: what somebody may have us fetch must not reach what only we can reach. https alone; the name is resolved once,
every address of the answer is judged, and a judged address is the one that is dialled, under the name's own SNI, Host
and certificate. No redirects, no proxies of the environment, no cookies; at most `MAX_BODY_BYTES` and `MAX_SECONDS`.
Nothing of a URL, a header or a body stands in an error.

Each request has a connection of its own: what one request was given (a client certificate) serves no other.
"""

import asyncio
import ipaddress
import os
import socket
import ssl
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from weakref import WeakValueDictionary

import httpx

from control_plane.contract.address import is_public
from control_plane.contract.destination import is_ip_literal
from control_plane.core.urls import InvalidUrlError, OutboundUrl, parse_outbound_url
from control_plane.ports import OutboundError, OutboundFailure, OutboundReply, OutboundRequest, whose_doing

MAX_BODY_BYTES: Final = 256 * 1024
MAX_SECONDS: Final = 5.0
MAX_AT_ONCE: Final = 64
"""For all tenants, and as many for the platform itself: no tenant's slow servers keep a key from being asked for."""
MAX_OF_ONE_TENANT: Final = 24
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_OURS_ALONE: Final = frozenset({"host", "accept-encoding", "connection", "content-length", "transfer-encoding"})

Resolver = Callable[[str, int], Awaitable[Sequence[str]]]
"""A canonical name and a port into addresses, as text; a zone id stays. Raises `OSError`."""

Listener = tuple[str, int]
"""An address and a port that this process itself listens on."""


class UnusableCaFileError(ValueError):
    """Names the file."""


@dataclass(frozen=True, slots=True)
class Exceptions:
    """Hosts that may have a private address, by name and port: the platform administrator's word alone."""

    endpoints: frozenset[tuple[str, int]] = frozenset()

    def admit(self, url: OutboundUrl) -> bool:
        return (url.endpoint.host, url.endpoint.port) in self.endpoints


class HttpOutbound:
    def __init__(
        self,
        *,
        ca_files: Sequence[Path] = (),
        exceptions: Exceptions = Exceptions(),
        own: Sequence[Listener] = (),
        resolve: Resolver | None = None,
    ) -> None:
        """`ca_files` are trusted beside the system's roots. Raises `UnusableCaFileError`."""
        self._ca_files = tuple(ca_files)
        self._exceptions = exceptions
        self._own = tuple(own)
        self._resolve = resolve or _system_resolver
        self._trust = self._context()
        self._platforms_turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._tenants_turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """Of the tenants for which something is being sent."""

    async def send(self, request: OutboundRequest) -> OutboundReply:
        """Any status is a reply. Raises `OutboundError`."""
        # (1) One spelling of the URL.
        url, progress = _parsed(request.url), _Progress()
        try:
            async with asyncio.timeout(min(request.seconds, MAX_SECONDS)), self._turn():
                # (2) One answer of the resolver, all of it judged.
                addresses = await self._addresses(url)
                # (3) A judged address is dialled; the next one only where nothing has been sent yet.
                return await self._exchanged(request, url, addresses, progress)
        except TimeoutError:
            raise OutboundError(OutboundFailure.TIMEOUT, sent=progress.sent) from None

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        tenant = whose_doing()
        if tenant is None:
            async with self._platforms_turns:
                yield
            return
        # Its own share first: what waits for that keeps nobody else waiting.
        share = self._shares.setdefault(tenant, asyncio.Semaphore(MAX_OF_ONE_TENANT))
        async with share, self._tenants_turns:
            yield

    async def _addresses(self, url: OutboundUrl) -> Sequence[str]:
        host, port = url.endpoint.host, url.endpoint.port
        try:
            found = [host] if is_ip_literal(host) else await self._resolve(host, port)
        except (OSError, UnicodeError):
            raise OutboundError(OutboundFailure.UNREACHABLE) from None
        if not found:
            raise OutboundError(OutboundFailure.UNREACHABLE)
        for address in found:
            if _is_own(address, port, self._own):
                raise OutboundError(OutboundFailure.DENIED_ADDRESS)
            if not self._exceptions.admit(url) and not is_public(address):
                raise OutboundError(OutboundFailure.DENIED_ADDRESS)
        return found

    async def _exchanged(
        self, request: OutboundRequest, url: OutboundUrl, addresses: Sequence[str], progress: "_Progress"
    ) -> OutboundReply:
        trust = self._trust
        if request.client_certificate_pem is not None:
            trust = await asyncio.to_thread(self._context, request.client_certificate_pem)
        failure = OutboundFailure.UNREACHABLE
        for address in addresses:
            try:
                return await _exchange(
                    request, url, address, trust, progress, connect_seconds=MAX_SECONDS / len(addresses)
                )
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = _why_not_connected(error)
            except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout):
                raise OutboundError(OutboundFailure.TIMEOUT, sent=progress.sent) from None
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError, ssl.SSLError):
                raise OutboundError(OutboundFailure.UNREADABLE, sent=progress.sent) from None
            except (httpx.LocalProtocolError, httpx.InvalidURL, UnicodeError):
                raise OutboundError(OutboundFailure.INVALID_REQUEST) from None
        raise OutboundError(failure)

    def _context(self, client_certificate_pem: bytes | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context()
        for file in self._ca_files:
            try:
                context.load_verify_locations(cafile=file)
            except (OSError, ValueError):
                raise UnusableCaFileError(f"{file} is not a readable file of PEM certificates") from None
        if client_certificate_pem is not None:
            try:
                with _as_file(client_certificate_pem) as path:
                    context.load_cert_chain(path)
            except (ssl.SSLError, OSError, ValueError):
                raise OutboundError(OutboundFailure.INVALID_REQUEST) from None
        return context


class _Progress:
    """Whether anything of a request was written: from then on it is not known what became of it."""

    def __init__(self) -> None:
        self.sent = False

    async def trace(self, event: str, _info: object) -> None:
        if event == "http11.send_request_headers.started":
            self.sent = True


async def _exchange(
    request: OutboundRequest,
    url: OutboundUrl,
    address: str,
    trust: ssl.SSLContext,
    progress: _Progress,
    *,
    connect_seconds: float,
) -> OutboundReply:
    literal = f"[{address}]" if ":" in address else address
    transport = httpx.AsyncHTTPTransport(verify=trust, trust_env=False)
    async with (
        httpx.AsyncClient(
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(MAX_SECONDS, connect=connect_seconds),
        ) as client,
        client.stream(
            request.method,
            f"https://{literal}:{url.endpoint.port}{url.target}",
            headers=_headers(request, url),
            content=request.body,
            # The name of SNI and of the certificate; the URL above holds the address that was judged.
            extensions={"sni_hostname": url.endpoint.host, "trace": progress.trace},
        ) as response,
    ):
        if response.status_code in _REDIRECTS:
            raise OutboundError(OutboundFailure.REDIRECT, sent=True)
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise OutboundError(OutboundFailure.UNREADABLE, sent=True)
        return OutboundReply(response.status_code, dict(response.headers), await _body(response))


def _headers(request: OutboundRequest, url: OutboundUrl) -> dict[str, str]:
    given = {name: value for name, value in request.headers.items() if name.lower() not in _OURS_ALONE}
    return {
        "Host": url.authority,
        "User-Agent": "coatcheck",
        "Accept": "*/*",
        **given,
        # What comes compressed grows after it was counted.
        "Accept-Encoding": "identity",
        "Connection": "close",
    }


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise OutboundError(OutboundFailure.TOO_LARGE, sent=True)
    return bytes(body)


def _parsed(untrusted_url: str) -> OutboundUrl:
    try:
        return parse_outbound_url(untrusted_url)
    except InvalidUrlError:
        raise OutboundError(OutboundFailure.INVALID_URL) from None


def _why_not_connected(error: BaseException) -> OutboundFailure:
    if isinstance(error, httpx.ConnectTimeout):
        return OutboundFailure.TIMEOUT
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return OutboundFailure.UNVERIFIED
        cause = cause.__cause__ or cause.__context__
    return OutboundFailure.UNREACHABLE


def _is_own(address: str, port: int, own: Sequence[Listener]) -> bool:
    """Whether dialling there would reach ourselves: the address we listen on, or any of this machine's if on all."""
    parsed = ipaddress.ip_address(address.partition("%")[0])
    plain = getattr(parsed, "ipv4_mapped", None) or parsed
    for listening_host, listening_port in own:
        if port != listening_port:
            continue
        listening = ipaddress.ip_address(listening_host)
        # 0.0.0.0 and :: reach whatever listens on loopback.
        if plain == listening or plain.is_unspecified or (listening.is_unspecified and _is_local(str(plain))):
            return True
    return False


def _is_local(address: str) -> bool:
    """Whether the address is this machine's: only then can a socket be bound to it."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
        return True


async def _system_resolver(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(_with_zone(entry[4]) for entry in found))


def _with_zone(address: tuple[object, ...]) -> str:
    """`getaddrinfo`'s address as text; a scope id makes it link-local, which the judge must see."""
    text = str(address[0])
    has_scope = len(address) == 4 and address[3] and "%" not in text
    return f"{text}%{address[3]}" if has_scope else text


@contextmanager
def _as_file(pem: bytes) -> Iterator[str]:
    """`load_cert_chain` wants a path. Where the system has memory files, the key never touches a disk."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("client", os.MFD_CLOEXEC), "wb") as file:
            file.write(pem)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as file:  # mode 0600
            file.write(pem)
            file.flush()
            yield file.name
