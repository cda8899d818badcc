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
    r"(?:ALIBABA_CLOUD|ANTHROPIC|AWS|AZURE|BOTO|CLAUDE|CLOUD_ML|CLOUDSDK|CO|COHERE|GCE|GCLOUD|GCP|GEMINI|GOOGLE|GROQ|HF"
    r"|HUGGING_FACE|HUGGINGFACE|IDENTITY|LANGCHAIN|LANGSMITH|MISTRAL|MSI|OPENAI|OPENROUTER|REPLICATE|TOGETHER|VERTEX)"
    r"_[A-Z0-9_]+"
)
# What a secret is called, whoever reads it: `GITHUB_TOKEN`, `STRIPE_API_KEY_2`, `SMTP_PASS`, `SENTRY_DSN`.
_CALLED_A_SECRET: Final = re.compile(
    r"(?:[A-Z0-9_]*_)?(?:APIKEY|KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|CRED|PAT|AUTH|DSN|JWT|COOKIE)S?"
    r"(?:_?[0-9]+)?|[A-Z0-9_]+_(?:PASS|PWD)"  # PWD alone is a folder
    r"|PGPASSWORD|PGPASSFILE|NETRC|DOCKER_AUTH_CONFIG|OTEL_EXPORTER_OTLP_(?:[A-Z]+_)?HEADERS"
)
# Where requests go instead: base URLs of SDKs, proxies (with a user's password in them), and a file for TLS's secrets.
_LEADS_ELSEWHERE: Final = re.compile(
    r"[A-Z0-9_]*_(?:BASE_URL|ENDPOINT|ENDPOINT_URL|API_URL|API_BASE)|SENTRY_URL|SSLKEYLOGFILE"
    r"|(?!NO_)[A-Z0-9]+_PROXY"
)
# A user's password in an address, whatever the variable is called: `DATABASE_URL`.
_HAS_A_PASSWORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#\s]*:[^/?#\s]*@")
_OURS: Final = "COATCHECK_"


def scrubbed(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without ambient credentials. To scrub it again changes nothing."""
    kept = {name: value for name, value in environment.items() if not is_ambient(name, value)}
    return kept | dict.fromkeys(sorted(SENTINELS), UNUSED_VARIABLE_SENTINEL)


def is_ambient(name: str, value: str = "") -> bool:
    """Whether an SDK may take a credential from it, or where to send one. Case does not matter to all who read them."""
    known = name.upper()
    if known.startswith(_OURS):
        return False  # files and addresses; the settings refuse what they do not know
    if _HAS_A_PASSWORD.search(value):
        return True
    return any(pattern.fullmatch(known) for pattern in (_FAMILIES, _CALLED_A_SECRET, _LEADS_ELSEWHERE))
