"""Probes (`ports.ProbeCaller`): our own egress proxy is called as any client of its reverse listener would call it.

Rule: the address comes from the settings alone. The general outbound client refuses what is private and what is ours,
and rightly; this one speaks to one place and takes no other. Nothing of a reply is read but its head.
"""

import ssl
from collections.abc import Sequence
from pathlib import Path

import httpx

from control_plane.contract.headers import REFUSAL_HEADER
from control_plane.ports import ProbeCall, ProbeReply, ProbeUnansweredError


class HttpProbeCaller:
    def __init__(self, *, proxy_base_url: str, ca_files: Sequence[Path] = ()) -> None:
        """`ca_files` are trusted for the proxy's listener beside the system's roots. Raises `OSError`."""
        self._base_url = proxy_base_url.rstrip("/")
        self._trust = ssl.create_default_context()
        for file in ca_files:
            self._trust.load_verify_locations(file)

    async def call(self, call: ProbeCall) -> ProbeReply:
        """Raises `ProbeUnansweredError`."""
        if not self._base_url:
            raise ProbeUnansweredError("the settings name no egress proxy (COATCHECK_CONTROL_PLANE_PROXY_BASE_URL)")
        headers = dict(call.headers) | {"proxy-authorization": f"Bearer {call.proxy_credential}"}
        try:
            async with (
                httpx.AsyncClient(verify=self._trust, trust_env=False, timeout=call.seconds) as client,
                client.stream(call.method, self._base_url + call.target, headers=headers) as reply,
            ):
                return ProbeReply(reply.status_code, reply.headers.get(REFUSAL_HEADER, ""))
        except httpx.ConnectError:
            raise ProbeUnansweredError("the egress proxy cannot be reached") from None
        except httpx.TimeoutException:
            raise ProbeUnansweredError(f"no answer within {call.seconds:.0f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
            raise ProbeUnansweredError(f"the egress proxy's answer cannot be read ({type(error).__name__})") from None
