"""The stream of changes (`GET /internal/events`): in order, at once, from where a proxy left off, with heartbeats."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, Queue
from threading import Thread
from typing import Any

import httpx
import pytest

from control_plane.contract.wire import EVENT, read
from tests.control_plane.conftest import OwnControlPlane
from tests.control_plane.serving import PROXY, ControlPlane
from tests.control_plane.workspace import HOST, SECRET, Json, Workspace, sha256


class Stream:
    """Reads an event stream in a thread of its own."""

    def __init__(self, response: httpx.Response) -> None:
        self.messages: Queue[tuple[str, str, Json]] = Queue()
        self._response = response
        self._thread = Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        fields: dict[str, str] = {}
        try:
            for line in self._response.iter_lines():
                if line:
                    name, _, value = line.partition(": ")
                    fields[name] = value
                elif fields:
                    self.messages.put((fields["id"], fields["event"], json.loads(fields["data"])))
                    fields = {}
        except httpx.HTTPError:
            return

    def next(self, timeout: float = 5) -> Json:
        identifier, kind, data = self.messages.get(timeout=timeout)
        assert (identifier, kind) == (str(data["sequence"]), data["kind"])
        return data

    def until(self, wanted: Callable[[Json], bool]) -> list[Json]:
        """Everything up to and with the first that is wanted."""
        seen: list[Json] = []
        while not seen or not wanted(seen[-1]):
            seen.append(self.next())
        return seen

    def wait_for_end(self) -> None:
        self._thread.join(5)
        assert not self._thread.is_alive()


@contextmanager
def streaming(
    control_plane: ControlPlane,
    *,
    after: int | None = None,
    last_event_id: str | None = None,
    proxy: tuple[str, str] = PROXY,
) -> Iterator[Stream]:
    headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
    query = {} if after is None else {"after": after}
    with (
        httpx.Client(base_url=control_plane.url, trust_env=False, timeout=20) as client,
        client.stream("GET", "/internal/events", params=query, headers=headers, auth=proxy) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        yield Stream(response)


def position(control_plane: ControlPlane) -> int:
    answer = control_plane.http.get("/internal/tag-keys", auth=PROXY).json()
    as_of: int = answer["as_of"]
    return as_of


def test_a_stream_begins_with_a_heartbeat_that_says_where_it_stands(workspace: Workspace) -> None:
    workspace.add_credential()
    keys = workspace.control_plane.http.get("/internal/tag-keys", auth=PROXY).json()

    with streaming(workspace.control_plane) as stream:
        first = stream.next()

    assert (first["kind"], first["sequence"], first["epoch"]) == ("heartbeat", keys["as_of"], keys["epoch"])


def test_a_change_is_pushed_at_once(granted: Workspace) -> None:
    issued = granted.exchange()
    with streaming(granted.control_plane) as stream:
        stream.next()
        began = time.monotonic()
        granted.control_plane.made("DELETE", granted.path(f"placeholders/{issued['id']}"))
        pushed = stream.next()
        took = time.monotonic() - began

    assert (pushed["kind"], pushed["id"], pushed["revoked"]) == ("placeholder", issued["id"], True)
    assert took < 2  # a heartbeat would have been three seconds


Act = Callable[[Workspace, Json, Json], Any]

CHANGES: dict[str, tuple[Act, list[tuple[str, str, bool]]]] = {
    "rotated": (
        lambda w, session, issued: w.rotate("a-new-key"),
        [("credential", "CREDENTIAL", False), ("policy", "TENANT", False)],
    ),
    "rotated as compromised": (
        lambda w, session, issued: w.rotate("a-new-key", compromised=True),
        [("credential", "CREDENTIAL", True), ("policy", "TENANT", False)],
    ),
    "its destinations changed": (
        lambda w, session, issued: w.patch_credential({"destinations": [{"url": f"https://{HOST}/v1"}]}),
        [("credential", "CREDENTIAL", True), ("policy", "TENANT", False)],
    ),
    "its variables changed": (
        lambda w, session, issued: w.patch_credential({"variables": ["X"]}),
        [("credential", "CREDENTIAL", False), ("policy", "TENANT", False)],
    ),
    "deleted": (
        lambda w, session, issued: w.control_plane.made("DELETE", w.path("credentials/example")),
        [("credential", "CREDENTIAL", True), ("policy", "TENANT", False)],
    ),
    "a grant removed": (
        lambda w, session, issued: w.remove_grant(w.control_plane.made("GET", w.path("grants"))["items"][0]),
        [("grant", "GRANT", True), ("policy", "TENANT", False)],
    ),
    "a grant added": (
        lambda w, session, issued: w.grant(subject="bob"),
        [("credential", "CREDENTIAL", False), ("policy", "TENANT", False)],
    ),
    "a rule added": (
        lambda w, session, issued: w.control_plane.made("POST", w.path("allow-rules"), {"host": "mirror.test"}),
        [("policy", "TENANT", False)],
    ),
    "its session ended": (
        lambda w, session, issued: w.end_session(session),
        [("session", "SESSION", True)],
    ),
    "its client removed": (
        lambda w, session, issued: w.control_plane.made("DELETE", f"/v1/clients/{w.runtime}"),
        # The second is for proxies that know it by a proof of its own: no session needs to hang on that.
        [("session", "SESSION", True), ("proxy_credential", "CLIENT", True)],
    ),
    "its tenant removed": (
        lambda w, session, issued: w.control_plane.made("DELETE", f"/v1/tenants/{w.tenant}?confirm={w.tenant}"),
        [("tenant", "TENANT", True)],
    ),
}


@pytest.mark.parametrize(("act", "expected"), CHANGES.values(), ids=CHANGES.keys())
def test_every_change_is_told_with_what_it_touches(
    granted: Workspace, act: Act, expected: list[tuple[str, str, bool]]
) -> None:
    session = granted.open_session()
    issued = granted.exchange(session)
    (grant,) = granted.control_plane.made("GET", granted.path("grants"))["items"]
    names = {
        "CREDENTIAL": granted.credential()["id"],
        "PLACEHOLDER": issued["id"],
        "GRANT": grant["id"],
        "SESSION": session["session_id"],
        "PROXY_CREDENTIAL": sha256(issued["proxy_credential"]),
        "TENANT": granted.tenant,
        "CLIENT": f"client:{granted.runtime}",
    }
    before = position(granted.control_plane)

    act(granted, session, issued)

    with streaming(granted.control_plane, after=before) as stream:
        events = stream.until(lambda event: event["kind"] == "heartbeat")[:-1]
    assert [(event["kind"], event["id"], event["revoked"]) for event in events] == [
        (kind, names[name], revoked) for kind, name, revoked in expected
    ]
    assert {event["tenant"] for event in events} == {granted.tenant}
    assert SECRET not in str(events)
    assert issued["access_token"] not in str(events)


def test_what_only_adds_time_or_tokens_is_no_change(granted: Workspace) -> None:
    before = position(granted.control_plane)

    granted.renew(granted.exchange())

    assert position(granted.control_plane) == before


def test_a_stream_goes_on_exactly_where_the_proxy_left_off(workspace: Workspace) -> None:
    before = position(workspace.control_plane)
    workspace.add_credential()
    for number in range(5):
        workspace.rotate(f"key-{number}")
    with streaming(workspace.control_plane, after=before) as stream:
        everything = stream.until(lambda event: event["kind"] == "heartbeat")[:-1]

    for cut in range(len(everything)):
        resumed_at = str(everything[cut]["sequence"])
        with streaming(workspace.control_plane, last_event_id=resumed_at) as stream:
            rest = stream.until(lambda event: event["kind"] == "heartbeat")[:-1]
        assert rest == everything[cut + 1 :]


def test_the_header_wins_over_the_query(workspace: Workspace) -> None:
    workspace.add_credential()
    now = position(workspace.control_plane)

    with streaming(workspace.control_plane, after=0, last_event_id=str(now)) as stream:
        assert stream.next()["kind"] == "heartbeat"


def test_a_number_from_another_history_is_answered_with_ours(workspace: Workspace) -> None:
    workspace.add_credential()
    now = position(workspace.control_plane)

    with streaming(workspace.control_plane, after=now + 1_000_000) as stream:
        first = stream.next()
        workspace.rotate("a-new-key")
        second = stream.next()

    assert (first["kind"], first["sequence"]) == ("heartbeat", now)
    assert (second["kind"], second["sequence"]) == ("credential", now + 1)


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "9" * 40, "١", "1 OR 1"])
def test_what_is_no_sequence_is_an_error(control_plane: ControlPlane, after: str) -> None:
    response = control_plane.http.get("/internal/events", params={"after": after}, auth=PROXY)

    assert (response.status_code, response.json()["code"]) == (400, "malformed_request")


def test_every_message_is_an_event_of_the_contract(granted: Workspace) -> None:
    with streaming(granted.control_plane, after=0) as stream:
        for message in stream.until(lambda event: event["kind"] == "heartbeat"):
            assert read(EVENT, json.dumps(message)).sequence == message["sequence"]


@pytest.mark.long
def test_a_quiet_stream_beats_every_three_seconds(control_plane: ControlPlane) -> None:
    with streaming(control_plane) as stream:
        stream.next()
        began = time.monotonic()
        beats = [stream.next(timeout=5) for _ in range(2)]

    assert [beat["kind"] for beat in beats] == ["heartbeat"] * 2
    assert 5 < time.monotonic() - began < 8


def test_a_change_made_by_another_process_is_told_with_the_next_heartbeat(workspace: Workspace) -> None:
    plane = workspace.control_plane
    with streaming(plane) as stream:
        stream.next()
        plane.edit(
            "INSERT INTO outbox (at, tenant, kind, subject_id, revoked) VALUES (0, ?, 'policy', ?, 0)",
            workspace.tenant,
            workspace.tenant,
        )

        seen = stream.until(lambda event: event["kind"] == "policy" and event["tenant"] == workspace.tenant)

    assert seen


def test_a_server_that_goes_ends_its_streams_and_waits_for_none(own_control_plane: OwnControlPlane) -> None:
    from contextlib import ExitStack

    with ExitStack() as stack:
        plane = own_control_plane()
        streams = [stack.enter_context(streaming(plane)) for _ in range(3)]
        for stream in streams:
            stream.next()

        began = time.monotonic()
        plane.stop()

        for stream in streams:
            stream.wait_for_end()
        assert time.monotonic() - began < 4


def test_a_proxy_that_hangs_up_leaves_nothing_behind(workspace: Workspace) -> None:
    for _ in range(20):
        with streaming(workspace.control_plane) as stream:
            stream.next()

    with streaming(workspace.control_plane) as stream:
        assert stream.next()["kind"] == "heartbeat"
        with pytest.raises(Empty):
            stream.next(timeout=0.2)


@pytest.mark.guards("control_plane/api/internal.py", "if await records.clients.get(proxy.id) != proxy:", "if False:")
@pytest.mark.parametrize(
    ("method", "body"), [("DELETE", None), ("PATCH", {"secret": "new"})], ids=["removed", "another secret"]
)
def test_a_proxy_that_may_ask_no_more_hears_no_more(
    own_control_plane: OwnControlPlane, method: str, body: Json | None
) -> None:
    workspace = Workspace(own_control_plane(), "acme")
    plane = workspace.control_plane
    secret = workspace.add_client("second-proxy", "egress_proxy", tenant=None)
    with streaming(plane, proxy=("second-proxy", secret)) as stream:
        stream.next()

        plane.made(method, "/v1/clients/second-proxy", body)
        workspace.add_credential("kept-from-it")

        stream.wait_for_end()
        heard = list(stream.messages.queue)
    assert [event for _, kind, event in heard if kind != "proxy_credential"] == []
