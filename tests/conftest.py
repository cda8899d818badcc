"""What every test gets: an environment without the machine's own proxies, certificates and settings."""

import os
import shutil

import pytest
from hypothesis import settings

settings.register_profile("coatcheck", deadline=None)
settings.load_profile("coatcheck")
"""Property tests run on machines with other work to do: no deadline for a single example."""

pytest_plugins = (
    "tests.attacks.plugin",
    "tests.mutants.plugin",
    "tests.support.client_table",
    "tests.support.fault_table",
    "tests.support.fixtures",
)

AMBIENT = (
    "HTTP_PROXY HTTPS_PROXY ALL_PROXY NO_PROXY http_proxy https_proxy all_proxy no_proxy "
    "SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE GIT_SSL_CAINFO AWS_CA_BUNDLE NODE_EXTRA_CA_CERTS "
    "NIX_SSL_CERT_FILE NODE_OPTIONS JAVA_TOOL_OPTIONS"
).split()
"""Variables with which a machine points its programs at its own proxy or certificates: clients under test obey them."""


def pytest_configure(config: pytest.Config) -> None:
    for name in (*AMBIENT, *(name for name in os.environ if name.startswith("COATCHECK_"))):
        os.environ.pop(name, None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        (program,) = mark.args
        if shutil.which(program) is None:
            told = f"{program} is not installed here"
            pytest.fail(told) if os.environ.get("CI") == "true" else pytest.skip(told)
