"""One spelling of every host, and a path scope that no spelling of a path climbs out of."""

import ipaddress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from control_plane.contract.destination import (
    AllowRule,
    Destination,
    Endpoint,
    InvalidDestinationError,
    authority,
    canonical_host,
    climbs,
    destination_from_json,
    destination_to_json,
    is_ip_literal,
    is_plain_path,
    parse_destination,
    path_is_within,
    split_authority,
)

FILE = "control_plane/contract/destination.py"

labels = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
names = st.lists(labels, min_size=1, max_size=4).map(".".join)
ipv4 = st.ip_addresses(v=4).map(str)
ipv6 = st.ip_addresses(v=6).map(str)
hosts = names | ipv4 | ipv6
prefixes = st.lists(st.from_regex(r"[a-z0-9._~-]{1,8}", fullmatch=True), max_size=3).map(
    lambda parts: "/" + "/".join(parts)
)
method_sets = st.none() | st.frozensets(st.sampled_from(["GET", "POST", "PUT", "DELETE", "M-SEARCH"]), min_size=1)


# --- hosts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spelling", "canonical"),
    [
        ("api.example.com", "api.example.com"),
        ("API.Example.COM", "api.example.com"),
        ("api.example.com.", "api.example.com"),
        ("bücher.example", "xn--bcher-kva.example"),
        ("BÜCHER.example", "xn--bcher-kva.example"),
        ("xn--bcher-kva.example", "xn--bcher-kva.example"),
        ("api。example。com", "api.example.com"),
        ("ａｐｉ.example", "api.example"),
        ("_dmarc.example.com", "_dmarc.example.com"),
        ("localhost", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
        ("127.0.0.1.", "127.0.0.1"),
        ("１２７.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("[2001:DB8::00A]", "2001:db8::a"),
        ("a" * 63 + ".example", "a" * 63 + ".example"),
    ],
)
def test_every_spelling_of_a_host_has_one_canonical_form(spelling: str, canonical: str) -> None:
    assert canonical_host(spelling) == canonical


@pytest.mark.parametrize(
    "odd",
    [
        *("", ".", "..", "a..b", ".a", "a.b..", "-a", "a-", "a" * 64, "a." * 127 + "toolong"),
        *("a b", "a\tb", "a\n", "\na", "a\x00", "a\x00.example.com", "api.example.com\x00.evil.test", "a\x7f"),
        *("a/b", "a\\b", "a@b", "user@host", "user:pw@host", "a?b", "a#b", "a%41", "a%00", "a,b", "a*", "*.a", "a'b"),
        *("2130706433", "0x7f000001", "0x7F.0.0.1", "0177.0.0.1", "127.1", "127.0.1", "1.2.3.4.5", "256.1.1.1", "0x"),
        *("01.2.3.4", "1.2.3", "1..2.3", "0x7f.1", "00000000000000000000000000000001"),
        *("[::1", "::1]", "[]", "[a]", "[127.0.0.1]", "[::1]x", ":::", "1:2", "g::1", "::1%eth0", "[fe80::1%25eth0]"),
        *("::ffff:1.2.3.4.5", "[[::1]]", "::1 ", "12345::"),
        *("\ud800", "a\ud800.b", "\u202eabc.example", "a\u200b\u200d.", "☃\ufffd", "xn--\u00fc"),
    ],
)
def test_a_host_without_a_canonical_form_is_an_error(odd: str) -> None:
    with pytest.raises(InvalidDestinationError):
        canonical_host(odd)


@given(host=hosts)
def test_canonical_hosts_stay_as_they_are(host: str) -> None:
    canonical = canonical_host(host)

    assert canonical_host(canonical) == canonical


@given(host=names, upper=st.lists(st.booleans(), min_size=60, max_size=60), final_dot=st.sampled_from(["", "."]))
@pytest.mark.guards(FILE, 'host = host.lower().removesuffix(".")', "host = host.lower()")
def test_case_and_a_final_dot_never_make_another_host(host: str, upper: list[bool], final_dot: str) -> None:
    spelling = "".join(c.upper() if up else c for c, up in zip(host, upper, strict=False)) + host[60:] + final_dot

    assert canonical_host(spelling) == host


@given(address=st.ip_addresses(v=6))
def test_every_spelling_of_an_ipv6_address_is_one_host(address: ipaddress.IPv6Address) -> None:
    spellings = (str(address), address.exploded, address.exploded.upper(), f"[{address.compressed}]")

    assert {canonical_host(spelling) for spelling in spellings} == {canonical_host(str(address))}


@given(untrusted=st.text() | st.text("0123456789abcdefxX.:[]%-_ \x00\ud800üＡ。"))
def test_any_text_is_either_an_error_or_canonical_for_good(untrusted: str) -> None:
    try:
        canonical = canonical_host(untrusted)
    except InvalidDestinationError:
        return

    assert canonical_host(canonical) == canonical
    assert canonical.isascii()
    assert canonical == canonical.lower()
    assert not set(canonical) & set("/\\@?#% \x00[]\r\n\t,")


@given(host=hosts)
def test_an_address_is_told_from_a_name(host: str) -> None:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        is_address = False
    else:
        is_address = True

    assert is_ip_literal(canonical_host(host)) == is_address


# --- authorities -----------------------------------------------------------------------------------------------------


@given(host=hosts, port=st.integers(1, 65535), scheme=st.sampled_from(["https", "http"]))
def test_an_authority_splits_into_what_it_was_made_of(host: str, port: int, scheme: str) -> None:
    canonical = canonical_host(host)
    default_port = {"https": 443, "http": 80}[scheme]

    assert split_authority(authority(canonical, port, scheme), default_port=default_port) == (canonical, port)


@pytest.mark.parametrize(
    ("untrusted", "split"),
    [
        ("api.example.com", ("api.example.com", 443)),
        ("API.example.com.:8443", ("api.example.com", 8443)),
        ("127.0.0.1:1", ("127.0.0.1", 1)),
        ("[::1]", ("::1", 443)),
        ("[::1]:65535", ("::1", 65535)),
    ],
)
def test_an_authority_is_host_and_port(untrusted: str, split: tuple[str, int]) -> None:
    assert split_authority(untrusted, default_port=443) == split


@pytest.mark.parametrize(
    "untrusted",
    [
        *("", ":", ":443", "a:", "a:0", "a:65536", "a:99999", "a:000443", "a:-1", "a:+1", "a: 1", "a:1 ", "a:1:2"),
        *("a:٣", "a:0x50", "a:4e1", "a:443\n", "a:443/", "a:443@b", "user@a", "user:pw@a:443", "::1", "::1:443"),
        *("[::1", "[::1]443", "[::1]:", "[::1]:x", "[]:443", "x[::1]:443", "[127.0.0.1]:443", "[a]:443"),
    ],
)
def test_an_odd_authority_is_an_error(untrusted: str) -> None:
    with pytest.raises(InvalidDestinationError):
        split_authority(untrusted, default_port=443)


@given(untrusted=st.text() | st.text("a1.:[]@- \x00٣ü"))
def test_splitting_any_text_raises_nothing_else(untrusted: str) -> None:
    try:
        host, port = split_authority(untrusted, default_port=443)
    except InvalidDestinationError:
        return

    assert canonical_host(host) == host
    assert 0 < port < 65536


# --- destinations ----------------------------------------------------------------------------------------------------


@given(
    scheme=st.sampled_from(["https", "http"]),
    host=hosts,
    port=st.integers(1, 65535),
    prefix=prefixes.filter(is_plain_path),
    methods=method_sets,
    allow_private=st.booleans(),
)
def test_a_destination_survives_the_trip_to_json_and_back(
    scheme: str, host: str, port: int, prefix: str, methods: frozenset[str] | None, allow_private: bool
) -> None:
    destination = Destination(Endpoint(scheme, canonical_host(host), port), prefix, methods, allow_private)

    assert destination_from_json(destination_to_json(destination)) == destination
    assert parse_destination(destination.url, methods=methods, allow_private=allow_private) == destination


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://API.example.com.", "https://api.example.com"),
        ("HTTPS://api.example.com:443/", "https://api.example.com"),
        ("http://api.example.com:80", "http://api.example.com"),
        ("http://api.example.com:443", "http://api.example.com:443"),
        ("https://[::1]:8443/v1", "https://[::1]:8443/v1"),
        ("https://api.example.com/v1/projects/1/", "https://api.example.com/v1/projects/1/"),
    ],
)
def test_a_destination_shows_its_one_spelling(url: str, shown: str) -> None:
    assert parse_destination(url).url == shown


@pytest.mark.parametrize(
    "url",
    [
        *("", "api.example.com", "//api.example.com", "https:/api.example.com", "https:api.example.com", "https://"),
        *("ftp://a.example", "javascript://a", "file:///etc/passwd", "https+unix://a", " https://a.example"),
        *("https://user@a.example", "https://user:pw@a.example", "https://a.example?x=1", "https://a.example/#f"),
        *("https://a.example/ x", "https://a.example\\b", "https://a.example/\\b", "https://a.example\n"),
        *("https://a.example/v1/../v2", "https://a.example/./v1", "https://a.example//v1", "https://a.example/v1;x"),
        *("https://a.example/%76", "https://a.example/é", "https://a.example:0", "https://*.example", "https:///v1"),
    ],
)
def test_an_odd_destination_is_an_error(url: str) -> None:
    with pytest.raises(InvalidDestinationError):
        parse_destination(url)


@pytest.mark.parametrize("methods", [frozenset(), frozenset({""}), frozenset({"get"}), frozenset({"GET", "P T"})])
@pytest.mark.guards(FILE, "if methods is not None and (not methods or any(", "if methods is not None and (any(")
def test_an_empty_or_odd_set_of_methods_is_an_error_and_never_means_any(methods: frozenset[str]) -> None:
    with pytest.raises(InvalidDestinationError):
        parse_destination("https://a.example", methods=methods)


@pytest.mark.parametrize(
    "data",
    [
        *({}, {"url": None}, {"url": 1}, {"url": ["https://a.example"]}),
        *({"url": "https://a.example", "methods": "GET"}, {"url": "https://a.example", "methods": [1]}),
        {"url": "https://a.example", "methods": []},
        {"url": "https://a.example", "allow_private": "false"},
        {"url": "https://a.example", "allow_private": 1},
        {"url": "https://a.example", "allow_private": None},
    ],
)
@pytest.mark.guards(
    FILE, "if not isinstance(url, str) or not isinstance(allow_private, bool):", "if not isinstance(url, str):"
)
def test_a_destination_in_json_is_read_strictly(data: dict[str, Any]) -> None:
    with pytest.raises(InvalidDestinationError):
        destination_from_json(data)


def test_a_destination_admits_its_own_methods_only() -> None:
    destination = parse_destination("https://a.example", methods=frozenset({"GET"}))

    assert destination.admits_method("GET")
    assert not destination.admits_method("POST")
    assert not destination.admits_method("get")


# --- paths -----------------------------------------------------------------------------------------------------------

SCOPE = "/v1/p/1/"
CLIMBING = [
    *("/v1/p/1/../2", "/v1/p/1/%2e%2e/2", "/v1/p/1/%2E%2e/2", "/v1/p/1/.%2e/2", "/v1/p/1/%2e./2"),
    *("/v1/p/1/%252e%252e/2", "/v1/p/1/%25252e%25252e/2", "/v1/p/1/%2525252525252e/2"),
    *("/v1/p/1/..%2f2", "/v1/p/1/..%2F2", "/v1/p/1/..%252f2", "/v1/p/1/%2e%2e%2f2", "/v1/p/1/%2fetc", "/v1/p/1/a%2fb"),
    *("/v1/p/1/..\\2", "/v1/p/1/..%5c2", "/v1/p/1/%5c..%5c2", "/v1/p/1/a\\b", "/v1/p/1\\..\\2"),
    *("/v1/p/1/..;x/2", "/v1/p/1/..;/2", "/v1/p/1/a;x", "/v1/p/1/..%3bx/2", "/v1/p/1/;/../2"),
    *(
        "/v1/p/1//2",
        "/v1/p/1//../2",
        "/v1/p//1/x",
        "//v1/p/1/x",
        "/v1/p/1/./x",
        "/v1/p/1/.",
        "/v1/p/1/..",
        "/v1/p/1/%2e",
    ),
    *("/v1/p/1/%c0%ae%c0%ae/2", "/v1/p/1/%c0%af2", "/v1/p/1/%e0%80%ae%e0%80%ae/2", "/v1/p/1/%f0%80%80%ae/"),
    *("/v1/p/1/%u002e%u002e/2", "/v1/p/1/%", "/v1/p/1/%2", "/v1/p/1/%zz", "/v1/p/1/.%"),
    *("/v1/p/1/.%09./2", "/v1/p/1/.%0a./2", "/v1/p/1/.%0d./2", "/v1/p/1/..%00/2", "/v1/p/1/..%7f/2"),
]
OUTSIDE = ["/v1/p/1", "/v1/p/10", "/v1/p/2/x", "/V1/p/1/x", "/", "", "v1/p/1/x", "/%76%31/p/1/x", "*", "/v1/p/1%2fx"]
INSIDE = [
    *(
        "/v1/p/1/",
        "/v1/p/1/x",
        "/v1/p/1/x/y",
        "/v1/p/1/...",
        "/v1/p/1/a..b",
        "/v1/p/1/..a",
        "/v1/p/1/%41",
        "/v1/p/1/a%20b",
    ),
    *("/v1/p/1/%c3%bc", "/v1/p/1/100%25", "/v1/p/1/100%25used", "/v1/p/1/a:b@c", "/v1/p/1/a=b&c"),
]


@pytest.mark.parametrize("raw_path", CLIMBING)
@pytest.mark.guards(
    FILE, "    if not is_plain_path(raw_path):\n        return False\n    return raw_path", "    return raw_path"
)
def test_a_path_that_a_server_could_read_as_leaving_the_scope_is_outside_it(raw_path: str) -> None:
    assert not path_is_within(raw_path, SCOPE)


@pytest.mark.parametrize("raw_path", OUTSIDE)
def test_a_path_beside_the_scope_is_outside_it(raw_path: str) -> None:
    assert not path_is_within(raw_path, SCOPE)


@pytest.mark.parametrize("raw_path", INSIDE)
def test_a_plain_path_under_the_scope_is_inside_it(raw_path: str) -> None:
    assert path_is_within(raw_path, SCOPE)


@pytest.mark.parametrize(
    ("raw_path", "within"),
    [
        ("/v1", True),
        ("/v1/", True),
        ("/v1/x", True),
        ("/v10", False),
        ("/v1x/y", False),
        ("/v", False),
        ("/v1.", False),
    ],
)
@pytest.mark.guards(FILE, 'return raw_path.startswith(stem + "/") or', "return raw_path.startswith(stem) or")
def test_a_prefix_matches_whole_segments(raw_path: str, within: bool) -> None:
    assert path_is_within(raw_path, "/v1") == within


@pytest.mark.parametrize("raw_path", ["/@scope%2fname", "/a/../b", "//x", "/a;b", "/%c0%ae"])
def test_a_whole_host_admits_every_path_as_it_was_sent(raw_path: str) -> None:
    assert path_is_within(raw_path, "/")


@given(steps=st.lists(st.sampled_from(["a", "b", "1", "..", "."]), min_size=1, max_size=6), data=st.data())
def test_no_encoding_of_dot_segments_leads_out_of_a_scope(steps: list[str], data: st.DataObject) -> None:
    raw_path = "/v1/p/1"
    for step in steps:
        raw_path += data.draw(st.sampled_from(["/", "/", "%2f", "%252f", "\\", "%5C"])) + _encoded(step, data)

    if path_is_within(raw_path, SCOPE):
        assert ".." not in steps
        assert "." not in steps


def _encoded(text: str, data: st.DataObject) -> str:
    """Each character as it is, or percent-encoded up to three times."""
    out = ""
    for char in text:
        times = data.draw(st.integers(0, 3))
        out += char if times == 0 else "%" + "25" * (times - 1) + f"{ord(char):02x}"
    return out


@given(raw_path=st.text("/.a%2eE5fFcC;\\", max_size=12).map(lambda text: "/" + text))
def test_a_plain_path_never_climbs(raw_path: str) -> None:
    assert not (is_plain_path(raw_path) and climbs(raw_path))


@pytest.mark.parametrize(
    "raw_path",
    [
        *("/..", "/../x", "/a/../b", "/a/..", "/.", "/a/./b", "/%2e%2e/x", "/%2E./x", "/%252e%252e/x", "/%2525252e./x"),
        *("/..%2fx", "/a%2f..%2fx", "/..%252fx", "/..\\x", "/..%5cx", "/a\\..", "/..;x/y", "/..;/y", "/%2e%2e%3bx/y"),
        "/%" + "25" * 9 + "2e",
    ],
)
@pytest.mark.guards(FILE, r'in decoded.replace(b"\\", b"/").split(b"/")', 'in decoded.split(b"/")')
def test_a_reverse_route_sees_dot_segments_in_every_encoding(raw_path: str) -> None:
    assert climbs(raw_path)


@pytest.mark.parametrize("raw_path", ["/@scope%2fname", "/a%2fb", "/...", "/a..b", "/v1/", "/%41", "/100%25", "/a;x=1"])
def test_a_reverse_route_lets_paths_without_dot_segments_through(raw_path: str) -> None:
    assert not climbs(raw_path)


# --- allow rules -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "url", "method", "admitted"),
    [
        (AllowRule("a.example"), "https://a.example", "GET", True),
        (AllowRule("a.example"), "http://a.example", "GET", True),
        (AllowRule("a.example"), "https://a.example:8443", "GET", False),
        (AllowRule("a.example"), "http://a.example:443", "GET", False),
        (AllowRule("a.example"), "https://b.example", "GET", False),
        (AllowRule("a.example"), "https://x.a.example", "GET", False),
        (AllowRule("a.example", port=8443), "https://a.example:8443", "GET", True),
        (AllowRule("a.example", port=8443), "https://a.example", "GET", False),
        (AllowRule("a.example", methods=frozenset({"GET"})), "https://a.example", "GET", True),
        (AllowRule("a.example", methods=frozenset({"GET"})), "https://a.example", "POST", False),
    ],
)
@pytest.mark.guards(
    FILE, "return endpoint.host == self.host and endpoint.port == port and", "return endpoint.host == self.host and"
)
def test_an_allow_rule_admits_its_host_port_and_methods_only(
    rule: AllowRule, url: str, method: str, admitted: bool
) -> None:
    assert rule.admits(parse_destination(url).endpoint, method) == admitted
