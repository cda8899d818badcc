"""What an environment says to SDKs, and what is left of it before anybody is served.

Whoever starts a process may have keys in its environment, and SDKs take them without being told to: from a variable of
that name, from a profile in a file, from an identity of the machine. A turn that took one of those would act as nobody
in particular, for every tenant alike.

Rule: what an SDK insists on holds one text that opens nothing, the same in every process and every turn. Whatever might
come before it, lead elsewhere, or is called like a secret, is not there.
"""

import re
from collections.abc import Mapping
from typing import Final

from control_plane.contract.headers import UNUSED_VARIABLE_SENTINEL

SENTINELS: Final = frozenset(
    {
        *("ANTHROPIC_API_KEY", "OPENAI_API_KEY", "AZURE_OPENAI_API_KEY", "GEMINI_API_KEY", "MISTRAL_API_KEY"),
        *("CO_API_KEY", "GROQ_API_KEY", "TOGETHER_API_KEY", "OPENROUTER_API_KEY", "DEEPSEEK_API_KEY", "XAI_API_KEY"),
        *("PERPLEXITY_API_KEY", "FIREWORKS_API_KEY", "REPLICATE_API_TOKEN"),
    }
)
"""What the SDKs of model providers refuse to be made without."""

# Whole families, since they grow with every release: custom headers, profiles, federations, other clouds' endpoints.
_FAMILIES: Final = re.compile(
    r"(?:ANTHROPIC|AWS|AZURE|BOTO|CLAUDE|CLOUD_ML|CLOUDSDK|CO|COHERE|GCLOUD|GCP|GEMINI|GOOGLE|GROQ|HF|HUGGING_FACE"
    r"|HUGGINGFACE|LANGCHAIN|LANGSMITH|MISTRAL|OPENAI|OPENROUTER|REPLICATE|TOGETHER|VERTEX)_[A-Z0-9_]+"
)
# What a secret is called, whoever reads it: `GITHUB_TOKEN`, `STRIPE_API_KEY`, `PGPASSWORD`, `SENTRY_DSN`.
_CALLED_A_SECRET: Final = re.compile(
    r"(?:[A-Z0-9_]*_)?(?:KEY|KEYS|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CREDENTIALS|PAT|AUTH|DSN)"
    r"|PGPASSWORD|PGPASSFILE|MYSQL_PWD|NETRC|DOCKER_AUTH_CONFIG"
)
# Where requests go instead: base URLs of SDKs, proxies (with a user's password in them), and a file for TLS's secrets.
_LEADS_ELSEWHERE: Final = re.compile(
    r"[A-Z0-9_]*_(?:BASE_URL|ENDPOINT|ENDPOINT_URL|API_URL|API_BASE)|SENTRY_URL|SSLKEYLOGFILE"
    r"|(?:HTTP|HTTPS|ALL|FTP|WS|WSS)_PROXY"
)
_OURS: Final = "COATCHECK_"


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without ambient credentials. To scrub it again changes nothing."""
    kept = {name: value for name, value in environment.items() if not is_ambient(name)}
    return kept | dict.fromkeys(sorted(SENTINELS), UNUSED_VARIABLE_SENTINEL)


def is_ambient(name: str) -> bool:
    """Whether an SDK may take a credential from it, or where to send one. Case does not matter to all who read them."""
    known = name.upper()
    if known.startswith(_OURS):
        return False  # files and addresses; the settings refuse what they do not know
    return any(pattern.fullmatch(known) for pattern in (_FAMILIES, _CALLED_A_SECRET, _LEADS_ELSEWHERE))
