"""Reading a ClientHello, as real TLS clients write them, however it is cut."""

import ssl

import pytest

from egress_proxy.client_hello import ClientHello, IncompleteError, NotTlsError, read_client_hello


def client_hello(*, server_name: str | None, protocols: list[str] | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = server_name is not None
    if protocols:
        context.set_alpn_protocols(protocols)
    outgoing = ssl.MemoryBIO()
    client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=server_name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize("server_name", ["api.u.test", None])
@pytest.mark.parametrize("protocols", [None, ["h2"], ["h2", "http/1.1"]])
def test_name_and_protocols_are_read(server_name: str | None, protocols: list[str] | None) -> None:
    hello = read_client_hello(client_hello(server_name=server_name, protocols=protocols))

    assert hello == ClientHello(server_name, tuple(name.encode() for name in protocols or ()))


def test_every_beginning_of_it_is_incomplete() -> None:
    whole = client_hello(server_name="api.u.test", protocols=["h2"])

    for end in range(len(whole)):
        with pytest.raises(IncompleteError):
            read_client_hello(whole[:end])


def test_it_may_be_split_over_several_records() -> None:
    whole = client_hello(server_name="api.u.test", protocols=["h2"])
    message = whole[5:]
    records = b"".join(b"\x16\x03\x01" + len(p).to_bytes(2) + p for p in (message[:3], message[3:90], message[90:]))

    assert read_client_hello(records) == read_client_hello(whole)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n",
        b"\x16\x02\x01\x00\x05",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x00\x08\x01\x00\x00\x04\x03\x03\x00\x00",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
    ],
)
def test_anything_else_is_not_tls(data: bytes) -> None:
    with pytest.raises(NotTlsError):
        read_client_hello(data)
