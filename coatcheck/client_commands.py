"""`coatcheck client …`: registered workloads, and how each proves itself."""

from pathlib import Path
from typing import Annotated, Any

import typer

from coatcheck.client import Json
from coatcheck.json_file import read_keys, read_text
from coatcheck.stack import control_plane_of
from coatcheck.terminal import WrongUsageError, done, invocation, listing, show_json, show_table

app = typer.Typer(help="Register clients: runtimes, proxies, operators' jobs.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
KeysFile = Annotated[
    Path | None, typer.Option(metavar="F", help="Its public keys: a JWK, or a key set. '-': standard input.")
]
JwksUrl = Annotated[str | None, typer.Option(metavar="URL", help="Where its public keys are published.")]
WorkloadIssuer = Annotated[
    str | None, typer.Option(metavar="ISSUER", help="The trusted issuer of its workload tokens.")
]
WorkloadSubject = Annotated[
    str | None, typer.Option(metavar="PATTERN", help="Whose tokens: * within a segment, ** across.")
]
CertificateDns = Annotated[str | None, typer.Option(metavar="NAME", help="The DNS name in its certificate.")]
CertificateUri = Annotated[str | None, typer.Option(metavar="URI", help="The URI (SPIFFE id) in its certificate.")]
CertificateEmail = Annotated[str | None, typer.Option(metavar="ADDRESS", help="The address in its certificate.")]
CertificateIp = Annotated[str | None, typer.Option(metavar="ADDRESS", help="The IP address in its certificate.")]
CertificateDn = Annotated[str | None, typer.Option(metavar="DN", help="The subject of its certificate (RFC 4514).")]
SelfSigned = Annotated[Path | None, typer.Option(metavar="F", help="Its certificate of its own making (PEM).")]


@app.command("add")
def add(
    context: typer.Context,
    name: Name,
    kind: Annotated[str, typer.Option(metavar="K", help="runtime, egress_proxy or operator.")],
    tenant: Annotated[str | None, typer.Option(metavar="T", help="Of this tenant alone.")] = None,
    scope: Annotated[list[str] | None, typer.Option(metavar="S", help="subject:assert. Repeatable.")] = None,
    keys_file: KeysFile = None,
    jwks_url: JwksUrl = None,
    workload_issuer: WorkloadIssuer = None,
    workload_subject: WorkloadSubject = None,
    certificate_dns: CertificateDns = None,
    certificate_uri: CertificateUri = None,
    certificate_email: CertificateEmail = None,
    certificate_ip: CertificateIp = None,
    certificate_dn: CertificateDn = None,
    self_signed: SelfSigned = None,
    with_secret: Annotated[bool, typer.Option("--with-secret", help="A secret beside its other proofs.")] = False,
) -> None:
    """Register a client. Without another proof it gets a secret, which is shown this once."""
    proofs = _proofs(
        keys_file=keys_file,
        jwks_url=jwks_url,
        workload=(workload_issuer, workload_subject),
        certificate={
            "san_dns": certificate_dns,
            "san_uri": certificate_uri,
            "san_email": certificate_email,
            "san_ip": certificate_ip,
            "subject_dn": certificate_dn,
        },
        self_signed=self_signed,
    )
    fields: dict[str, Any] = {"id": name, "kind": kind, "tenant": tenant, "scopes": scope or [], "proofs": proofs}
    if with_secret:
        fields["secret"] = True
    with control_plane_of(context) as control_plane:
        made = control_plane.add_client(fields)
    _show_made(context, made, f"registered {made['id']}")


@app.command("change")
def change(
    context: typer.Context,
    name: Name,
    keys_file: KeysFile = None,
    jwks_url: JwksUrl = None,
    workload_issuer: WorkloadIssuer = None,
    workload_subject: WorkloadSubject = None,
    certificate_dns: CertificateDns = None,
    certificate_uri: CertificateUri = None,
    certificate_email: CertificateEmail = None,
    certificate_ip: CertificateIp = None,
    certificate_dn: CertificateDn = None,
    self_signed: SelfSigned = None,
    new_secret: Annotated[bool, typer.Option("--new-secret", help="A new secret; the old one ends.")] = False,
    no_secret: Annotated[bool, typer.Option("--no-secret", help="No secret any more.")] = False,
) -> None:
    """Change how a client proves itself; it keeps its sessions and placeholders. Proofs replace all old ones."""
    if new_secret and no_secret:
        raise WrongUsageError("--new-secret and --no-secret contradict each other")
    proofs = _proofs(
        keys_file=keys_file,
        jwks_url=jwks_url,
        workload=(workload_issuer, workload_subject),
        certificate={
            "san_dns": certificate_dns,
            "san_uri": certificate_uri,
            "san_email": certificate_email,
            "san_ip": certificate_ip,
            "subject_dn": certificate_dn,
        },
        self_signed=self_signed,
    )
    if not proofs and not new_secret and not no_secret:
        raise WrongUsageError("nothing to change; give another proof, --new-secret or --no-secret")
    fields: dict[str, Any] = {"secret": "new" if new_secret else "none" if no_secret else "keep"}
    if proofs:
        fields["proofs"] = proofs
    with control_plane_of(context) as control_plane:
        changed = control_plane.change_client(name, fields)
    _show_made(context, changed, f"changed {changed['id']}")


@app.command("list")
def list_(context: typer.Context) -> None:
    """Every client and how it proves itself, never a secret."""
    with control_plane_of(context) as control_plane:
        clients = control_plane.clients()
    if invocation(context).as_json:
        show_json(clients)
        return
    show_table(
        ["CLIENT", "KIND", "TENANT", "SCOPES", "PROVEN BY", "FROM"],
        [
            (each["id"], each["kind"], each["tenant"], listing(each["scopes"]), _proven_by(each), each["source"])
            for each in clients
        ],
        nothing="no clients",
    )


@app.command("delete")
def delete(context: typer.Context, name: Name) -> None:
    """Delete a client. Its sessions end and whatever it holds is revoked."""
    with control_plane_of(context) as control_plane:
        control_plane.delete_client(name)
    done(f"deleted client {name}, with its sessions and placeholders")


def _proofs(
    *,
    keys_file: Path | None,
    jwks_url: str | None,
    workload: tuple[str | None, str | None],
    certificate: dict[str, str | None],
    self_signed: Path | None,
) -> Json:
    if (workload[0] is None) != (workload[1] is None):
        raise WrongUsageError("--workload-issuer and --workload-subject come together")
    found: Json = {}
    if keys_file is not None:
        found["keys"] = read_keys(keys_file)
    if jwks_url is not None:
        found["jwks_url"] = jwks_url
    if workload[0] is not None:
        found["workload"] = {"issuer": workload[0], "subject": workload[1]}
    if named := {kind: value for kind, value in certificate.items() if value is not None}:
        found["certificate"] = named
    if self_signed is not None:
        found["self_signed"] = read_text(self_signed)
    return found


def _show_made(context: typer.Context, client: Json, said: str) -> None:
    if invocation(context).as_json:
        show_json(client)
        return
    done(f"{said}, proven by {_proven_by(client)}")
    if client["client_secret"] is not None:
        done("its secret, shown this once:")
        typer.echo(client["client_secret"])


def _proven_by(client: Json) -> str:
    return listing(client["proven_by"])
