"""The two ways through the proxy, behind one face: inside a CONNECT tunnel, and by a reverse route.

Rule: a case that holds for one way holds for the other, so it is written once and run on both.
"""

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tests.support.api import Ticket
from tests.support.processes import Proxy, Workspace
from tests.support.raw_client import Line, Response, dial, tunnel
from tests.support.upstream import Upstream

Headers = Iterable[tuple[str, str]]


class Kind(StrEnum):
    TUNNEL = "tunnel"
    REVERSE = "reverse"


@dataclass(frozen=True, slots=True)
class Way:
    """One caller's way to one upstream. Every request carries the placeholder as a bearer, unless told otherwise."""

    kind: Kind
    ticket: Ticket
    authority: str
    """Of the upstream, as its credential has it."""
    credential: str
    proxy: Proxy
    context: ssl.SSLContext

    @property
    def host(self) -> str:
        """What stands in `Host`."""
        return self.authority if self.kind is Kind.TUNNEL else f"127.0.0.1:{self.proxy.reverse_port}"

    def open(self) -> Line:
        """A connection on which requests to the upstream can be sent."""
        if self.kind is Kind.REVERSE:
            return dial(self.proxy.reverse_port)
        return tunnel(
            self.proxy.forward_port,
            self.authority,
            proxy_credential=self.ticket.proxy_credential,
            context=self.context,
        )

    def head(self, method: str, path: str, headers: Headers = (), *, bearer: bool = True) -> bytes:
        """A request's head, and no framing but what `headers` say."""
        target = path if self.kind is Kind.TUNNEL or path == "*" else f"/{self.credential}{path}"
        lines = [f"{method} {target} HTTP/1.1", f"Host: {self.host}"]
        if self.kind is Kind.REVERSE:
            lines.append(f"Proxy-Authorization: Bearer {self.ticket.proxy_credential}")
        if bearer:
            lines.append(f"Authorization: Bearer {self.ticket.placeholder}")
        lines += [f"{name}: {value}" for name, value in headers]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def request(
        self, method: str, path: str, headers: Headers = (), *, body: bytes = b"", bearer: bool = True
    ) -> bytes:
        """A whole request, its body framed by length."""
        framing = [("Content-Length", str(len(body)))] if body else []
        return self.head(method, path, [*headers, *framing], bearer=bearer) + body

    def ask(
        self,
        method: str,
        path: str,
        headers: Headers = (),
        *,
        body: bytes = b"",
        bearer: bool = True,
        timeout_seconds: float = 10,
    ) -> Response:
        """One request on a connection of its own."""
        with self.open() as line:
            return line.ask(
                self.request(method, path, headers, body=body, bearer=bearer), timeout_seconds=timeout_seconds
            )


def way(workspace: Workspace, upstream: Upstream | str, ticket: Ticket, kind: Kind, *, credential: str = "api") -> Way:
    """Through the first proxy of the deployment. `upstream` may be no more than an authority."""
    deployment = workspace.deployment
    authority = upstream if isinstance(upstream, str) else upstream.authority
    return Way(kind, ticket, authority, credential, deployment.proxy, deployment.client_context())
