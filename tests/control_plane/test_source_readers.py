"""Each kind of source against what it reads from: files and links, a Vault, AWS, a cluster's API, over real TLS."""

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import trustme

from control_plane.adapters.outbound import Exceptions, HttpOutbound
from control_plane.adapters.sources.auth_files import auth_files_in
from control_plane.adapters.sources.beneath import MissingFileError, NotReadableError, read_beneath
from control_plane.adapters.sources.file import FileReader
from control_plane.adapters.sources.kubernetes import Cluster, KubernetesReader
from control_plane.adapters.sources.secrets_manager import SecretsManagerReader
from control_plane.adapters.sources.vault import VaultReader
from control_plane.core.records import Source, SourceKind
from control_plane.ports import SourceError, SourceFailure
from tests.control_plane.serving import private_file
from tests.support.fake_aws import KEYS_FILE, REGION, FakeAws, serving_aws
from tests.support.fake_vault import FakeVault, serving_vault, tls_server

BENEATH = "control_plane/adapters/sources/beneath.py"
F = SourceFailure


def source(kind: SourceKind, **settings: Any) -> Source:
    return Source("s", kind, settings, "{tenant}/{name}", 60.0, None, b"", "", 1.0, 1.0)


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ca_file(ca: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ca") / "ca.pem"
    ca.cert_pem.write_to_path(path)
    return path


def outbound_to(port: int, ca_file: Path) -> HttpOutbound:
    return HttpOutbound(ca_files=[ca_file], exceptions=Exceptions(frozenset({("127.0.0.1", port)})))


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """With `acme/key`, and a secret beside it that nobody may reach."""
    (tmp_path / "root" / "acme").mkdir(parents=True)
    private_file(tmp_path / "root" / "acme" / "key", "of-acme\n")
    private_file(tmp_path / "kek.hex", "of-the-platform")
    return tmp_path / "root"


async def test_a_file_is_read_below_its_root(root: Path) -> None:
    read = await FileReader(root).read(source(SourceKind.FILE), path="acme/key", field=None)

    assert read.reveal() == "of-acme\n"


def link_to_a_file(root: Path) -> str:
    (root / "acme" / "link").symlink_to("../../kek.hex")
    return "acme/link"


def link_inside(root: Path) -> str:
    (root / "acme" / "link").symlink_to("key")
    return "acme/link"


def absolute_link(root: Path) -> str:
    (root / "acme" / "link").symlink_to(root.parent / "kek.hex")
    return "acme/link"


def link_to_a_folder(root: Path) -> str:
    (root / "evil").symlink_to("..")
    return "evil/kek.hex"


def hard_link(root: Path) -> str:
    (root / "acme" / "hard").hardlink_to(root.parent / "kek.hex")
    return "acme/hard"


def pipe(root: Path) -> str:
    os.mkfifo(root / "acme" / "pipe", 0o600)
    return "acme/pipe"


def folder(root: Path) -> str:
    (root / "acme" / "folder").mkdir()
    return "acme/folder"


def open_to_everybody(root: Path) -> str:
    (root / "acme" / "key").chmod(0o644)
    return "acme/key"


def too_long(root: Path) -> str:
    private_file(root / "acme" / "long", "x" * 20_000)
    return "acme/long"


def spelled(path: str) -> Callable[[Path], str]:
    return lambda _root: path


WAYS_OUT: dict[str, Callable[[Path], str]] = {
    "a link to a file": link_to_a_file,
    "a link to a file inside": link_inside,
    "an absolute link": absolute_link,
    "a folder that is a link": link_to_a_folder,
    "a second name of a file outside": hard_link,
    "a pipe": pipe,
    "a folder": folder,
    "a file that everybody may read": open_to_everybody,
    "a file that is too long": too_long,
    "two dots": spelled("acme/../../kek.hex"),
    "two dots alone": spelled(".."),
    "one dot": spelled("acme/./key"),
    "an absolute path": spelled("/etc/hostname"),
    "an empty part": spelled("acme//key"),
    "nothing": spelled(""),
    "a NUL": spelled("acme/key\0"),
}


@pytest.mark.guards(
    BENEATH, "_STEP: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC", "_STEP: Final = os.O_RDONLY | os.O_CLOEXEC"
)
@pytest.mark.guards(BENEATH, "if found.st_nlink != 1:", "if False:")
@pytest.mark.guards(BENEATH, "if found.st_mode & stat.S_IROTH:", "if False:")
@pytest.mark.guards(BENEATH, "if not stat.S_ISREG(found.st_mode):", "if False:")
@pytest.mark.parametrize("way", WAYS_OUT.values(), ids=WAYS_OUT.keys())
def test_no_name_leads_out_of_the_root_or_to_anything_but_a_plain_private_file(
    root: Path, way: Callable[[Path], str]
) -> None:
    path = way(root)

    with pytest.raises(NotReadableError) as error:
        read_beneath(root, path, max_bytes=16_386)

    assert not isinstance(error.value, MissingFileError)
    assert "of-" not in str(error.value)


def test_a_folder_exchanged_for_a_link_while_files_are_read_never_leads_out(root: Path) -> None:
    (root.parent / "outside").mkdir()
    private_file(root.parent / "outside" / "key", "of-the-platform")
    stop = threading.Event()

    def exchange() -> None:
        while not stop.is_set():
            (root / "acme").rename(root / "was")
            (root / "acme").symlink_to("../outside")
            (root / "acme").unlink()
            (root / "was").rename(root / "acme")

    thread = threading.Thread(target=exchange)
    thread.start()
    found = set()
    for _ in range(2000):
        try:
            found.add(read_beneath(root, "acme/key", max_bytes=100))
        except NotReadableError:
            continue
    stop.set()
    thread.join()

    assert found <= {b"of-acme\n"}


@pytest.mark.parametrize(("way", "failure"), [("acme/nothing", F.NOT_FOUND), ("nobody/key", F.NOT_FOUND)])
async def test_a_file_that_is_not_there_is_not_found(root: Path, way: str, failure: SourceFailure) -> None:
    with pytest.raises(SourceError) as error:
        await FileReader(root).read(source(SourceKind.FILE), path=way, field=None)

    assert error.value.failure is failure


async def test_without_a_folder_there_are_no_file_sources() -> None:
    with pytest.raises(SourceError) as error:
        await FileReader(None).read(source(SourceKind.FILE), path="acme/key", field=None)

    assert error.value.failure is F.MISCONFIGURED


@pytest.mark.parametrize("name", ["../kek.hex", "/etc/passwd", "a/b", "", ".hidden", ".."])
def test_a_source_names_no_auth_file_outside_of_its_folder(root: Path, name: str) -> None:
    with pytest.raises(SourceError) as error:
        auth_files_in(root)(name)

    assert error.value.failure is F.MISCONFIGURED


def test_an_auth_file_may_be_the_link_that_kubernetes_makes_of_it(root: Path) -> None:
    (root / "token").symlink_to("acme/key")

    assert auth_files_in(root)("token").reveal() == "of-acme"


# --- Vault -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def vault(ca: trustme.CA) -> Iterator[FakeVault]:
    with serving_vault(ca) as running:
        running.kv2["secret/acme/key"] = {"value": "from-kv2", "other": "another", "number": 7}
        running.kv1["kv/acme/key"] = {"value": "from-kv1"}
        running.kv2["team/secret/acme/key"] = {"value": "of-a-namespace"}
        yield running


@pytest.fixture
def auth_folder(tmp_path: Path, vault: FakeVault) -> Path:
    private_file(tmp_path / "token", vault.issue_token() + "\n")
    private_file(tmp_path / "jwt", "service-account-token")
    private_file(tmp_path / "role-id", "role")
    private_file(tmp_path / "secret-id", "s3cret")
    vault.kubernetes_roles["coatcheck"] = "service-account-token"
    vault.approles["role"] = "s3cret"
    return tmp_path


@pytest.fixture
async def vault_reader(vault: FakeVault, ca_file: Path, auth_folder: Path) -> VaultReader:
    return VaultReader(outbound_to(vault.port, ca_file), auth_files_in(auth_folder))


def vault_source(vault: FakeVault, auth: dict[str, Any] | None = None, **settings: Any) -> Source:
    auth = auth or {"method": "token", "token_file": "token"}
    return source(SourceKind.VAULT, address=vault.url, auth=auth, **settings)


async def read_vault(reader: VaultReader, made: Source, path: str = "acme/key", field: str | None = None) -> str:
    return (await reader.read(made, path=path, field=field)).reveal()


async def failure_of_vault(reader: VaultReader, made: Source, path: str = "acme/key") -> SourceFailure:
    with pytest.raises(SourceError) as error:
        await reader.read(made, path=path, field=None)
    assert "hvs." not in str(error.value)
    return error.value.failure


async def test_kv_engines_of_both_versions_are_read(vault: FakeVault, vault_reader: VaultReader) -> None:
    assert await read_vault(vault_reader, vault_source(vault)) == "from-kv2"
    assert await read_vault(vault_reader, vault_source(vault), field="other") == "another"
    assert await read_vault(vault_reader, vault_source(vault, kv_version="1", mount="kv")) == "from-kv1"


async def test_a_namespace_is_kept_to(vault: FakeVault, vault_reader: VaultReader) -> None:
    assert await read_vault(vault_reader, vault_source(vault, namespace="team")) == "of-a-namespace"


AUTHS: dict[str, dict[str, str]] = {
    "kubernetes": {"method": "kubernetes", "role": "coatcheck", "token_file": "jwt"},
    "approle": {"method": "approle", "role_id_file": "role-id", "secret_id_file": "secret-id"},
}


@pytest.mark.parametrize("auth", AUTHS.values(), ids=AUTHS.keys())
async def test_a_login_is_kept_and_made_anew_when_its_token_is_revoked(
    vault: FakeVault, vault_reader: VaultReader, auth: dict[str, str]
) -> None:
    made = vault_source(vault, auth)
    for _ in range(3):
        assert await read_vault(vault_reader, made) == "from-kv2"
    once = vault.logins()
    vault.tokens.clear()

    assert await read_vault(vault_reader, made) == "from-kv2"

    assert (once, vault.logins()) == (1, 2)


async def test_a_login_that_is_refused_is_denied_and_asked_for_no_more_than_twice(
    vault: FakeVault, vault_reader: VaultReader
) -> None:
    vault.kubernetes_roles["coatcheck"] = "another"

    assert await failure_of_vault(vault_reader, vault_source(vault, AUTHS["kubernetes"])) is F.DENIED
    assert vault.logins() == 1


async def test_what_a_vault_says_no_to_is_told_apart_from_a_vault_that_does_not_serve(
    vault: FakeVault, vault_reader: VaultReader, auth_folder: Path
) -> None:
    made = vault_source(vault)
    vault.kv2["secret/acme/deleted"] = None

    assert await failure_of_vault(vault_reader, made, "acme/nothing") is F.NOT_FOUND
    assert await failure_of_vault(vault_reader, made, "acme/deleted") is F.NOT_FOUND
    with pytest.raises(SourceError) as error:
        await vault_reader.read(made, path="acme/key", field="missing")
    assert error.value.failure is F.NOT_FOUND
    with pytest.raises(SourceError) as error:
        await vault_reader.read(made, path="acme/key", field="number")
    assert error.value.failure is F.UNUSABLE
    vault.sealed = True
    assert await failure_of_vault(vault_reader, made) is F.UNAVAILABLE
    vault.sealed = False
    vault.tokens.clear()
    assert await failure_of_vault(vault_reader, made) is F.DENIED
    (auth_folder / "token").unlink()
    assert await failure_of_vault(vault_reader, vault_source(vault, mount="secret")) is F.MISCONFIGURED


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"", "application/json"),
        (200, b"{}", "application/json"),
        (200, b"<html>", "text/html"),
        (200, b'{"data": {"data": 7}}', "application/json"),
        (200, b"[" * 5000, "application/json"),
        (302, b"", "text/plain"),
        (500, b'{"errors": ["x"]}', "application/json"),
        (502, b"bad gateway", "text/html"),
        (429, b'{"errors": ["slow"]}', "application/json"),
        (200, b"x" * 300_000, "application/json"),
    ],
    ids=lambda answer: f"{answer[0]} {answer[1][:9]!r}",
)
async def test_answers_that_no_vault_would_give_are_no_answers(
    vault: FakeVault, vault_reader: VaultReader, answer: tuple[int, bytes, str]
) -> None:
    vault.answer_instead = answer

    assert await failure_of_vault(vault_reader, vault_source(vault)) is F.UNAVAILABLE


async def test_a_vault_at_an_address_that_nobody_allowed_is_not_asked(
    vault: FakeVault, ca_file: Path, auth_folder: Path
) -> None:
    reader = VaultReader(HttpOutbound(ca_files=[ca_file]), auth_files_in(auth_folder))

    assert await failure_of_vault(reader, vault_source(vault)) is F.UNAVAILABLE
    assert vault.asked == []


async def test_a_vault_whose_certificate_nobody_trusts_is_not_asked(vault: FakeVault, auth_folder: Path) -> None:
    exceptions = Exceptions(frozenset({("127.0.0.1", vault.port)}))
    reader = VaultReader(HttpOutbound(exceptions=exceptions), auth_files_in(auth_folder))

    assert await failure_of_vault(reader, vault_source(vault)) is F.UNAVAILABLE
    assert vault.asked == []


async def test_nothing_of_the_environment_takes_part(
    vault: FakeVault, vault_reader: VaultReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VAULT_TOKEN", "hvs.of-the-environment")
    monkeypatch.setenv("VAULT_ADDR", "https://127.0.0.1:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")

    assert await read_vault(vault_reader, vault_source(vault, AUTHS["kubernetes"])) == "from-kv2"
    assert "hvs.of-the-environment" not in str(vault.asked)


# --- AWS Secrets Manager ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def aws(ca: trustme.CA, ca_file: Path) -> Iterator[FakeAws]:
    with serving_aws(ca, str(ca_file)) as running:
        client = running.client("secretsmanager")
        client.create_secret(Name="acme/key", SecretString="from-aws")
        client.create_secret(Name="acme/json", SecretString=json.dumps({"token": "from-json", "number": 7}))
        client.create_secret(Name="acme/binary", SecretBinary=b"\0")
        client.create_secret(Name="acme/deleted", SecretString="x")
        client.delete_secret(SecretId="acme/deleted")
        yield running


@pytest.fixture
async def aws_reader(aws: FakeAws, ca_file: Path, tmp_path: Path) -> SecretsManagerReader:
    private_file(tmp_path / "aws", KEYS_FILE)
    private_file(tmp_path / "jwt", "header.payload.signature")
    return SecretsManagerReader(outbound_to(int(aws.url.rpartition(":")[2]), ca_file), auth_files_in(tmp_path))


def aws_source(aws: FakeAws, auth: dict[str, str] | None = None) -> Source:
    auth = auth or {"method": "keys", "keys_file": "aws"}
    return source(SourceKind.AWS_SECRETS_MANAGER, region=REGION, endpoint=aws.url, auth=auth)


async def test_a_secret_of_aws_is_read_whole_or_by_its_field(aws: FakeAws, aws_reader: SecretsManagerReader) -> None:
    whole = await aws_reader.read(aws_source(aws), path="acme/key", field=None)
    field = await aws_reader.read(aws_source(aws), path="acme/json", field="token")

    assert (whole.reveal(), field.reveal()) == ("from-aws", "from-json")


async def test_a_role_is_assumed_with_a_projected_token(aws: FakeAws, aws_reader: SecretsManagerReader) -> None:
    auth = {"method": "web_identity", "role_arn": "arn:aws:iam::123456789012:role/coatcheck", "token_file": "jwt"}

    read = await aws_reader.read(aws_source(aws, auth), path="acme/key", field=None)

    assert read.reveal() == "from-aws"


@pytest.mark.parametrize(
    ("path", "field", "failure"),
    [
        ("acme/nothing", None, F.NOT_FOUND),
        ("acme/deleted", None, F.NOT_FOUND),
        ("acme/json", "missing", F.NOT_FOUND),
        ("acme/json", "number", F.UNUSABLE),
        ("acme/key", "token", F.UNUSABLE),
        ("acme/binary", None, F.UNUSABLE),
    ],
)
async def test_what_aws_does_not_have_is_told_apart(
    aws: FakeAws, aws_reader: SecretsManagerReader, path: str, field: str | None, failure: SourceFailure
) -> None:
    with pytest.raises(SourceError) as error:
        await aws_reader.read(aws_source(aws), path=path, field=field)

    assert error.value.failure is failure


async def test_an_aws_that_is_not_reached_is_unavailable(aws: FakeAws, ca_file: Path, tmp_path: Path) -> None:
    private_file(tmp_path / "aws", KEYS_FILE)
    reader = SecretsManagerReader(HttpOutbound(ca_files=[ca_file]), auth_files_in(tmp_path))

    with pytest.raises(SourceError) as error:
        await reader.read(aws_source(aws), path="acme/key", field=None)

    assert error.value.failure is F.UNAVAILABLE


# --- Kubernetes ------------------------------------------------------------------------------------------------------

TOKEN = "the-pods-own-token"


@contextmanager
def api_server(ca: trustme.CA, answers: dict[str, tuple[int, bytes]]) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b'{"kind": "Status", "code": 404}'))
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                status, body = 401, b'{"kind": "Status", "code": 401}'
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing."""

    with tls_server(Handler, ca) as port:
        yield port


def a_secret(**data: bytes) -> bytes:
    encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
    return json.dumps({"kind": "Secret", "apiVersion": "v1", "data": encoded, "type": "Opaque"}).encode()


async def read_kubernetes(ca: trustme.CA, ca_file: Path, token: Path, status: int, body: bytes, key: str) -> str:
    with api_server(ca, {"/api/v1/namespaces/acme/secrets/keys": (status, body)}) as port:
        cluster = Cluster(f"https://127.0.0.1:{port}", token, outbound_to(port, ca_file))
        read = await KubernetesReader(cluster).read(source(SourceKind.KUBERNETES), path=f"acme/keys/{key}", field=None)
        return read.reveal()


async def test_a_secret_of_the_cluster_is_read_as_our_own_pod(ca: trustme.CA, ca_file: Path, tmp_path: Path) -> None:
    token = private_file(tmp_path / "token", TOKEN + "\n")

    assert await read_kubernetes(ca, ca_file, token, 200, a_secret(stripe=b"from-k8s\n"), "stripe") == "from-k8s\n"


@pytest.mark.parametrize(
    ("status", "body", "failure"),
    [
        (404, b"{}", F.NOT_FOUND),
        (403, b"{}", F.DENIED),
        (500, b"", F.UNAVAILABLE),
        (200, b"", F.UNAVAILABLE),
        (200, b'{"kind": "ConfigMap", "data": {"stripe": "eA=="}}', F.UNAVAILABLE),
        (200, b"[]", F.UNAVAILABLE),
        (200, a_secret(other=b"x"), F.NOT_FOUND),
        (200, a_secret(stripe=b"\xff\xfe"), F.UNUSABLE),
        (200, b'{"kind": "Secret", "data": {"stripe": "no base64!"}}', F.UNUSABLE),
        (200, b'{"kind": "Secret", "data": null}', F.NOT_FOUND),
    ],
)
async def test_what_the_cluster_does_not_give_is_told_apart(
    ca: trustme.CA, ca_file: Path, tmp_path: Path, status: int, body: bytes, failure: SourceFailure
) -> None:
    token = private_file(tmp_path / "token", TOKEN)

    with pytest.raises(SourceError) as error:
        await read_kubernetes(ca, ca_file, token, status, body, "stripe")

    assert error.value.failure is failure


async def test_a_token_that_the_cluster_does_not_know_is_denied(ca: trustme.CA, ca_file: Path, tmp_path: Path) -> None:
    token = private_file(tmp_path / "token", "another")

    with pytest.raises(SourceError) as error:
        await read_kubernetes(ca, ca_file, token, 200, a_secret(stripe=b"x"), "stripe")

    assert error.value.failure is F.DENIED


async def test_outside_of_a_cluster_there_is_no_such_source() -> None:
    with pytest.raises(SourceError) as error:
        await KubernetesReader(None).read(source(SourceKind.KUBERNETES), path="a/b/c", field=None)

    assert error.value.failure is F.MISCONFIGURED
