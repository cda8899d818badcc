"""A provider of tokens over real TLS: a token endpoint that replaces refresh tokens and knows when one comes twice.

Rule: it judges what it is sent as a strict provider does (RFC 6749 §5.2, RFC 9700 §4.14.2) and remembers every form.

    with TokenProvider(ca) as provider:
        provider.first_refresh_token          what a consent gave
        provider.fails = [plain(b"", status="500 …"), …]     the next answers, instead of its own
"""

import json
import secrets
import threading
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl

import trustme

from tests.support.upstream import Behaviour, Request, Upstream, Wire, message


class TokenProvider:
    def __init__(self, ca: trustme.CA) -> None:
        self.server = Upstream(ca)
        self.server.on("/token", self._answer)
        self.rotates = True
        self.expires_in: Any = 3600
        self.extra: dict[str, Any] = {}
        """What else an answer holds, or instead."""
        self.fails: list[Behaviour] = []
        self.revoked = False
        self.forms: list[dict[str, str]] = []
        self.heads: list[Request] = []
        self.reused = 0
        """How often a refresh token came that was replaced already."""
        self.first_refresh_token = self._valid = "rt-" + secrets.token_hex(8)
        self._spent: set[str] = set()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.stop()

    @property
    def token_url(self) -> str:
        return f"{self.server.url}/token"

    @property
    def questions(self) -> int:
        return len(self.forms)

    def consent(self) -> str:
        """A new refresh token, as a person would grant it; the old ones do not count any more."""
        with self._lock:
            self.revoked = False
            self._valid = "rt-" + secrets.token_hex(8)
            return self._valid

    async def _answer(self, request: Request, wire: Wire) -> None:
        form = dict(parse_qsl(request.body.decode(), keep_blank_values=True))
        self.forms.append(form)
        self.heads.append(request)
        if self.fails:
            await self.fails.pop(0)(request, wire)
            return
        status, answer = self._judged(form)
        body = json.dumps(answer).encode()
        await wire.write(message(body, status=status, headers=[("Content-Type", "application/json")]))

    def _judged(self, form: dict[str, str]) -> tuple[str, dict[str, Any]]:
        with self._lock:
            answer: dict[str, Any] = {"access_token": "at-" + secrets.token_hex(16), "token_type": "Bearer"}
            if form.get("grant_type") == "refresh_token":
                token = form.get("refresh_token", "")
                if token in self._spent:
                    self.reused += 1
                if token != self._valid or self.revoked:
                    return "400 Bad Request", {"error": "invalid_grant", "error_description": f"{token} is no good"}
                if self.rotates:
                    self._spent.add(token)
                    answer["refresh_token"] = self._valid = "rt-" + secrets.token_hex(8)
            if self.expires_in is not None:
                answer["expires_in"] = self.expires_in
            return "200 OK", answer | self.extra
