"""From settings to what custody needs of the outside: the ring of key-encryption keys, the readers of sources.

Rule: what proves us to a Vault or to AWS is read from its file each time it is needed, and kept by nobody.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from control_plane.adapters.keks.aws_kms import AwsKmsKek
from control_plane.adapters.keks.vault_transit import VaultTransitKek
from control_plane.adapters.keyring import read_kek_files
from control_plane.adapters.outbound import Exceptions, HttpOutbound
from control_plane.adapters.sources.auth_files import auth_files_in, read_auth_path
from control_plane.adapters.sources.file import FileReader
from control_plane.adapters.sources.kubernetes import SERVICE_ACCOUNT, Cluster, KubernetesReader
from control_plane.adapters.sources.secrets_manager import SecretsManagerReader
from control_plane.adapters.sources.vault import VaultReader
from control_plane.config import Settings
from control_plane.contract.destination import split_authority
from control_plane.core.records import SourceKind
from control_plane.core.sources import AwsAuth, VaultAuth
from control_plane.custody import RingMember
from control_plane.kek_ring import ReadRing
from control_plane.ports import KekProvider, Outbound, SourceReader

_HTTPS: Final = 443


def ring_reader(settings: Settings, outbound: Outbound) -> ReadRing:
    """The ring as the settings have it whenever it is called: what seals first, then what only opens."""
    elsewhere = _keks_elsewhere(settings, outbound)

    def read() -> Sequence[RingMember]:
        held = read_kek_files(settings.kek_files) if settings.kek_files else ()
        first: list[RingMember] = [elsewhere[settings.kek_provider]] if settings.kek_provider in elsewhere else []
        rest = [kek for name, kek in elsewhere.items() if name != settings.kek_provider]
        return [*first, *held, *rest]

    return read


def source_readers(
    settings: Settings, outbound: Outbound, environment: Mapping[str, str] = os.environ
) -> Mapping[SourceKind, SourceReader]:
    read_auth_file = auth_files_in(settings.sources_auth_folder)
    return {
        SourceKind.FILE: FileReader(settings.sources_folder),
        SourceKind.VAULT: VaultReader(outbound, read_auth_file),
        SourceKind.AWS_SECRETS_MANAGER: SecretsManagerReader(outbound, read_auth_file),
        SourceKind.KUBERNETES: KubernetesReader(_own_cluster(environment)),
    }


def _keks_elsewhere(settings: Settings, outbound: Outbound) -> dict[str, KekProvider]:
    found: dict[str, KekProvider] = {}
    if settings.kek_aws_key_arn:
        found["aws_kms"] = AwsKmsKek(
            outbound,
            key_arn=settings.kek_aws_key_arn,
            region=settings.kek_aws_key_arn.split(":")[3],
            endpoint=settings.kek_aws_endpoint or None,
            auth=AwsAuth(
                method="web_identity" if settings.kek_aws_role_arn else "keys",
                keys_file=_path(settings.kek_aws_keys_file),
                token_file=_path(settings.kek_aws_token_file),
                role_arn=settings.kek_aws_role_arn or None,
            ),
            read_auth_file=read_auth_path,
        )
    if settings.kek_vault_key:
        method = _vault_method(settings)
        found["vault_transit"] = VaultTransitKek(
            outbound,
            address=settings.kek_vault_address,
            namespace=settings.kek_vault_namespace or None,
            mount=settings.kek_vault_mount,
            key=settings.kek_vault_key,
            auth=VaultAuth(
                method=method,
                mount=settings.kek_vault_auth_mount or method,
                role=settings.kek_vault_role or None,
                token_file=_path(settings.kek_vault_token_file),
                role_id_file=_path(settings.kek_vault_role_id_file),
                secret_id_file=_path(settings.kek_vault_secret_id_file),
            ),
            read_auth_file=read_auth_path,
        )
    return found


def _vault_method(settings: Settings) -> str:
    if settings.kek_vault_role_id_file is not None:
        return "approle"
    return "kubernetes" if settings.kek_vault_role else "token"


def _own_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """The API server as Kubernetes tells every pod of it."""
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT_HTTPS")
    authority = SERVICE_ACCOUNT / "ca.crt"
    if not host or not authority.exists():
        return None
    place = f"[{host}]" if ":" in host else host
    url = f"https://{place}:{port or _HTTPS}"
    endpoint = split_authority(f"{place}:{port or _HTTPS}", default_port=_HTTPS)
    outbound = HttpOutbound(ca_files=[authority], exceptions=Exceptions(frozenset({endpoint})))
    return Cluster(url=url, token_file=SERVICE_ACCOUNT / "token", outbound=outbound)


def _path(file: Path | None) -> str | None:
    return str(file) if file is not None else None
