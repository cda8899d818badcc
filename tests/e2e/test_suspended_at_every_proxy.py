"""Two proxies, one control plane, all real: a secret that comes back through both is counted for both."""

import threading
from contextlib import ExitStack
from pathlib import Path

import trustme

from tests.control_plane.serving import control_plane_in
from tests.e2e.test_one_limit_over_several_proxies import Place
from tests.egress_proxy.world import ProxyThread, get
from tests.support.raw_client import Response, dial
from tests.support.upstream import Upstream, mirror_headers

BOUND_SECONDS = 5.0


def asked(place: Place, proxy: ProxyThread) -> Response:
    headers = {
        "Authorization": f"Bearer {place.issued['access_token']}",
        "Proxy-Authorization": f"Bearer {place.issued['proxy_credential']}",
    }
    with dial(proxy.proxy.reverse_port) as line:
        return line.ask(get("/example/v1", headers=headers))


def test_a_placeholder_whose_secret_came_back_through_two_proxies_is_suspended_at_both(tmp_path: Path) -> None:
    ca = trustme.CA()
    with control_plane_in(tmp_path) as control_plane, Upstream(ca) as upstream, ExitStack() as stack:
        place = Place(tmp_path, control_plane, upstream, ca)
        upstream.on("/v1", mirror_headers())
        one, other = stack.enter_context(place.proxy()), stack.enter_context(place.proxy())

        mirrored = [asked(place, proxy) for proxy in (one, one, other)]
        after = [until_refused(place, proxy) for proxy in (other, one)]

    assert [reply.status for reply in mirrored] == [200, 200, 200]
    assert [(reply.status, reply.refusal) for reply in after] == [(403, "revoked_placeholder")] * 2
    assert all("suspended" in reply.json()["detail"] for reply in after)


def until_refused(place: Place, proxy: ProxyThread) -> Response:
    """Asked without the echo, so that nothing is counted anew."""
    place.upstream.on("/v1", lambda _request, wire: wire.write(b"HTTP/1.1 204 No Content\r\n\r\n"))
    reply = asked(place, proxy)
    for _ in range(int(BOUND_SECONDS / 0.1)):
        if reply.status != 204:
            break
        threading.Event().wait(0.1)
        reply = asked(place, proxy)
    return reply
