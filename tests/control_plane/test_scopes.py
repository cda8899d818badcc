"""What `scope` of an exchange does: exactly what was asked, or `invalid_scope`; and never more than the grants."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from control_plane.contract.destination import Destination, Endpoint
from control_plane.contract.grant import GrantScope
from control_plane.core.scopes import InvalidScopeError, Narrowing, covers, narrowed, narrowed_by_token, read_scope
from tests.control_plane.test_exchange import assert_oauth_error
from tests.control_plane.workspace import JWT, Json, Workspace

METHODS = ["GET", "HEAD", "OPTIONS", "POST", "DELETE"]
PREFIXES = ["/", "/v1", "/v1/", "/v1/chat", "/v10", "/v2"]
PATHS = ["/", "/v1", "/v1/", "/v1/x", "/v1/chat", "/v1/chat/y", "/v10", "/v2/z", "/v1/../v2", "/other"]

methods = st.none() | st.frozensets(st.sampled_from(METHODS), min_size=1)
prefixes = st.none() | st.frozensets(st.sampled_from(PREFIXES), min_size=1)
grants = st.builds(GrantScope, methods=methods, path_prefixes=prefixes)
narrowings = st.builds(Narrowing, methods, prefixes)


def admits(scopes: list[GrantScope] | tuple[GrantScope, ...], method: str, path: str) -> bool:
    return any(scope.admits_method(method) and scope.admits_path(path) for scope in scopes)


@given(st.lists(grants, min_size=1, max_size=3), narrowings)
@example([GrantScope(path_prefixes=frozenset({"/v1"}))], Narrowing(None, frozenset({"/v1/"})))
@example([GrantScope(path_prefixes=frozenset({"/v1/"}))], Narrowing(None, frozenset({"/v1"})))
def test_a_narrowed_grant_admits_what_both_admit_and_nothing_else(
    granted: list[GrantScope], narrowing: Narrowing
) -> None:
    left = narrowed(granted, narrowing)

    asked = GrantScope(methods=narrowing.methods, path_prefixes=narrowing.path_prefixes)
    for method in METHODS:
        for path in PATHS:
            expected = admits(granted, method, path) and admits([asked], method, path)
            assert admits(left, method, path) == expected, (method, path)


@given(st.lists(grants, min_size=1, max_size=3), narrowings, st.sampled_from(PREFIXES), methods)
def test_what_is_covered_is_admitted_whole(
    granted: list[GrantScope], narrowing: Narrowing, prefix: str, allowed: frozenset[str] | None
) -> None:
    destination = Destination(Endpoint("https", "a.example", 443), prefix, allowed)
    if not covers(narrowing, grants=granted, destinations=[destination]):
        return

    asked = GrantScope(methods=narrowing.methods, path_prefixes=narrowing.path_prefixes)
    left = narrowed(granted, narrowing)
    for method in METHODS:
        for path in PATHS:
            if narrowing.methods and narrowing.path_prefixes and admits([asked], method, path):
                assert admits(left, method, path), (method, path)
                assert destination.admits_method(method)
                assert destination.admits_path(path)


@pytest.mark.parametrize(
    ("scope", "narrowing"),
    [
        ("", Narrowing()),
        ("read", Narrowing(frozenset({"GET", "HEAD", "OPTIONS"}))),
        ("method:POST", Narrowing(frozenset({"POST"}))),
        ("read method:POST", Narrowing(frozenset({"GET", "HEAD", "OPTIONS", "POST"}))),
        ("path:/v1/chat", Narrowing(None, frozenset({"/v1/chat"}))),
        ("method:GET path:/v1 path:/v2", Narrowing(frozenset({"GET"}), frozenset({"/v1", "/v2"}))),
    ],
)
def test_a_scope_is_read_as_it_is_written(scope: str, narrowing: Narrowing) -> None:
    assert read_scope(scope) == narrowing


BAD_SCOPES = [
    *(" ", "read ", " read", "read  method:GET", "READ", "write", "admin", "turn:write", "subject:assert", "*"),
    *(
        "method:",
        "method:get",
        "method:*",
        "method:GET,POST",
        "path:",
        "path:v1",
        "path:/v1/../v2",
        "path://x",
        "path:*",
    ),
    *("read\tmethod:GET", "read\n", 'path:/"', "path:/\\", "ré", "method:GET\x00", "read " * 300),
]


@pytest.mark.parametrize("scope", BAD_SCOPES)
def test_what_is_no_scope_of_ours_is_an_error(scope: str) -> None:
    with pytest.raises(InvalidScopeError):
        read_scope(scope)


def test_a_scope_that_cannot_be_read_leaves_nothing() -> None:
    assert narrowed_by_token([GrantScope()], "all of it") == ()


# --- over HTTP -------------------------------------------------------------------------------------------------------


def asked(workspace: Workspace, scope: str, **form: str) -> Any:
    session = workspace.open_session()
    form = {"subject_token": session["session_token"], "subject_token_type": JWT, "audience": "example"} | form
    return workspace.token(scope=scope, **form)


@pytest.mark.guards(
    "control_plane/resolution.py",
    "scopes = narrowed_by_token([grant.scope for grant in grants], token.scope)",
    "scopes = tuple(grant.scope for grant in grants)",
)
def test_a_placeholder_is_bound_to_the_scope_that_was_asked_for_and_the_answer_says_so(granted: Workspace) -> None:
    answer = asked(granted, "method:GET path:/v1/models").json()

    (scope,) = granted.resolve(answer)["binding"]["scopes"]
    assert answer["scope"] == "method:GET path:/v1/models"
    assert (scope["methods"], scope["path_prefixes"]) == (["GET"], ["/v1/models"])
    assert granted.renew(answer)["scope"] == answer["scope"]


def test_without_a_scope_the_grants_alone_bind(granted: Workspace) -> None:
    answer = granted.exchange()

    (scope,) = granted.resolve(answer)["binding"]["scopes"]
    assert answer["scope"] == ""
    assert (scope["methods"], scope["path_prefixes"]) == (None, None)


WIDER: dict[str, tuple[Json, str]] = {
    "a method that is not granted": ({"subject": "alice", "methods": ["GET"]}, "method:POST"),
    "one of two methods": ({"subject": "alice", "methods": ["GET"]}, "method:GET method:POST"),
    "read, of a grant for GET alone": ({"subject": "alice", "methods": ["GET"]}, "read"),
    "a path that is not granted": ({"subject": "alice", "path_prefixes": ["/v1"]}, "path:/v2"),
    "a wider path": ({"subject": "alice", "path_prefixes": ["/v1/chat"]}, "path:/v1"),
    "a path that begins alike": ({"subject": "alice", "path_prefixes": ["/v1"]}, "path:/v10"),
    "nothing that there is": ({"subject": "alice"}, "admin"),
    "the session token's own": ({"subject": "alice"}, "turn:write"),
}


@pytest.mark.guards(
    "control_plane/exchange.py",
    "if not covers(narrowing, grants=scopes, destinations=granted.credential.destinations):",
    "if False:",
)
@pytest.mark.parametrize(("grant", "scope"), WIDER.values(), ids=WIDER.keys())
def test_a_scope_wider_than_the_grants_is_an_error_and_issues_nothing(
    workspace: Workspace, grant: Json, scope: str
) -> None:
    workspace.add_credential()
    workspace.grant(**grant)

    assert_oauth_error(asked(workspace, scope), "invalid_scope")
    assert workspace.control_plane.made("GET", workspace.path("placeholders"))["items"] == []


def test_a_scope_wider_than_the_destinations_is_an_error(workspace: Workspace) -> None:
    workspace.add_credential(destinations=[{"url": "https://api.example.com/v1", "methods": ["GET"]}])
    workspace.grant()

    assert_oauth_error(asked(workspace, "method:POST"), "invalid_scope")
    assert_oauth_error(asked(workspace, "path:/v2"), "invalid_scope")
    assert asked(workspace, "method:GET path:/v1/models").status_code == 200


def test_a_grant_that_is_over_covers_no_scope(workspace: Workspace) -> None:
    workspace.add_credential()
    workspace.grant(subject="alice", methods=["GET"])
    workspace.grant(subject="alice", until=1)

    assert_oauth_error(asked(workspace, "method:POST"), "invalid_scope")


@pytest.mark.guards(
    "control_plane/exchange.py", "if request.scope is not None and request.scope != placeholder.scope:", "if False:"
)
def test_a_renewal_changes_no_scope(granted: Workspace) -> None:
    answer = asked(granted, "read").json()

    assert granted.renewal(answer, scope="read").json()["scope"] == "read"
    assert_oauth_error(granted.renewal(answer, scope="method:POST"), "invalid_scope")


def test_a_placeholder_whose_scope_was_edited_to_nonsense_does_nothing(granted: Workspace) -> None:
    answer = asked(granted, "read").json()
    granted.control_plane.edit("UPDATE tokens SET scope = 'everything' WHERE id = ?", answer["id"])

    assert granted.resolve(answer)["binding"]["scopes"] == []


def test_a_proxy_credential_has_no_scope(granted: Workspace) -> None:
    response = granted.token(
        subject_token=granted.open_session()["session_token"],
        subject_token_type=JWT,
        requested_token_type="urn:coatcheck:token-type:proxy-credential",
        scope="read",
    )

    assert_oauth_error(response, "invalid_scope")
