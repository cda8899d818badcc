"""The `kubernetes` source: Secrets of the cluster we run in, read over its API as our own pod.

Rule: the API server, its certificate authority and our token are the pod's own; nothing that an administrator says can
send the token elsewhere. The token is read anew for each request, because the kubelet replaces it.
https://kubernetes.io/docs/reference/kubernetes-api/config-and-storage-resources/secret-v1/
"""

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from control_plane.adapters.sources.asking import in_thread, why_not
from control_plane.contract.secret import Secret
from control_plane.core.records import Source
from control_plane.core.sources import KUBERNETES_PARTS
from control_plane.ports import Outbound, OutboundError, OutboundReply, OutboundRequest, SourceError, SourceFailure

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the API server is, and what proves us to it."""

    url: str
    token_file: Path
    outbound: Outbound
    """One that trusts the cluster's own authority, and may reach this address of it."""


class KubernetesReader:
    def __init__(self, cluster: Cluster | None) -> None:
        """None: we do not run in a cluster."""
        self._cluster = cluster

    async def read(self, source: Source, *, path: str, field: str | None) -> Secret:
        if self._cluster is None:
            raise SourceError(SourceFailure.MISCONFIGURED, "the control plane does not run in a Kubernetes cluster")
        namespace, name, key = path.split("/", KUBERNETES_PARTS - 1)
        cluster = self._cluster
        token = await in_thread(lambda: _token(cluster.token_file))
        request = OutboundRequest(
            "GET",
            f"{cluster.url}/api/v1/namespaces/{namespace}/secrets/{name}",
            headers={"Authorization": f"Bearer {token.reveal()}", "Accept": "application/json"},
        )
        try:
            reply = await cluster.outbound.send(request)
        except OutboundError as error:
            raise why_not(error) from None
        return _value(_fields(reply), key)


def _token(file: Path) -> Secret:
    try:
        return Secret(file.read_text("ascii").strip())
    except (OSError, UnicodeDecodeError):
        raise SourceError(SourceFailure.MISCONFIGURED, "our own service account token cannot be read") from None


def _fields(reply: OutboundReply) -> Mapping[str, Any]:
    match reply.status:
        case 200:
            pass
        case 404:
            raise SourceError(SourceFailure.NOT_FOUND, "there is no such Secret in the cluster")
        case 401 | 403:
            raise SourceError(
                SourceFailure.DENIED, "the cluster denies it: our service account needs 'get' on that Secret"
            )
        case status:
            raise SourceError(SourceFailure.UNAVAILABLE, f"the cluster's API does not serve (status {status})")
    try:
        secret = json.loads(reply.body)
        fields = (secret.get("data") or {}) if secret["kind"] == "Secret" else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fields = None
    if not isinstance(fields, Mapping):
        raise SourceError(SourceFailure.UNAVAILABLE, "what answers does not answer as Kubernetes does")
    return fields


def _value(fields: Mapping[str, Any], key: str) -> Secret:
    if key not in fields:
        raise SourceError(SourceFailure.NOT_FOUND, "the Secret in the cluster has no key of that name")
    try:
        return Secret(base64.b64decode(fields[key], validate=True).decode("utf-8"))
    except (binascii.Error, TypeError, ValueError):
        raise SourceError(SourceFailure.UNUSABLE, "the value in the cluster is not text (UTF-8)") from None
