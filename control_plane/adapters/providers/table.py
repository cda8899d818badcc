"""Which kind is minted by which provider."""

from collections.abc import Mapping

from control_plane.adapters.providers.aws import AwsAssumeRole
from control_plane.adapters.providers.github import GithubApp
from control_plane.adapters.providers.google import GoogleServiceAccount
from control_plane.adapters.providers.oauth import ClientCredentials, JwtBearer, RefreshToken
from control_plane.contract.kinds import CredentialKind
from control_plane.ports import Entropy, Outbound, Provider


def providers(outbound: Outbound, *, entropy: Entropy) -> Mapping[CredentialKind, Provider]:
    return {
        CredentialKind.OAUTH_REFRESH_TOKEN: RefreshToken(outbound, entropy),
        CredentialKind.OAUTH_CLIENT_CREDENTIALS: ClientCredentials(outbound, entropy),
        CredentialKind.JWT_BEARER: JwtBearer(outbound, entropy),
        CredentialKind.GOOGLE_SERVICE_ACCOUNT: GoogleServiceAccount(outbound),
        CredentialKind.GITHUB_APP: GithubApp(outbound),
        CredentialKind.AWS_ASSUME_ROLE: AwsAssumeRole(outbound),
    }
