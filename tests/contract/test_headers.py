"""Names on the wire that programs elsewhere rely on: changing one breaks them."""

import pytest

from control_plane.contract import headers


@pytest.mark.parametrize(
    ("name", "spelling"),
    [
        ("SUBJECT_HEADER", "X-SH-Subject"),
        ("REFUSAL_HEADER", "Coatcheck-Refusal"),
        ("REQUEST_ID_HEADER", "Coatcheck-Request-Id"),
        ("SHOULD_RETRY_HEADER", "x-should-retry"),
        ("PROBLEM_JSON", "application/problem+json"),
        ("REFUSAL_TYPE_PREFIX", "urn:coatcheck:refusal:"),
        ("GRANT_TYPE_TOKEN_EXCHANGE", "urn:ietf:params:oauth:grant-type:token-exchange"),
        ("TOKEN_TYPE_JWT", "urn:ietf:params:oauth:token-type:jwt"),
        ("TOKEN_TYPE_ID_TOKEN", "urn:ietf:params:oauth:token-type:id_token"),
        ("TOKEN_TYPE_ACCESS_TOKEN", "urn:ietf:params:oauth:token-type:access_token"),
        ("TOKEN_TYPE_PLACEHOLDER", "urn:coatcheck:token-type:placeholder"),
        ("TOKEN_TYPE_DIRECT", "urn:coatcheck:token-type:direct"),
        ("TOKEN_TYPE_SESSION", "urn:coatcheck:token-type:session"),
        ("SESSION_TOKEN_TYP", "coatcheck-session+jwt"),
        ("UNUSED_VARIABLE_SENTINEL", "coatcheck-unused-see-authorization-header"),
    ],
)
def test_a_name_on_the_wire_stays_as_it_is(name: str, spelling: str) -> None:
    assert getattr(headers, name) == spelling


def test_every_header_of_ours_has_our_prefix_so_that_none_crosses_the_proxy() -> None:
    for name in (headers.REFUSAL_HEADER, headers.REQUEST_ID_HEADER):
        assert name.lower().startswith(headers.OWN_HEADER_PREFIX)
