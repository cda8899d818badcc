"""The process's own environment, scrubbed. Every way into the runtime calls it before anything else."""

import os
from collections.abc import MutableMapping

from runtime.core.ambient import scrubbed


def scrub_ambient_credentials(environment: MutableMapping[str, str] = os.environ) -> frozenset[str]:
    """Takes every ambient credential out of the process's environment, children's included; the names that changed.

    What stands in `/proc/<pid>/environ` is what the process was started with, and stays: a server starts over with the
    clean environment instead (`coatcheck.serve`).
    """
    clean = scrubbed(environment)
    changed = frozenset(name for name in {*environment, *clean} if environment.get(name) != clean.get(name))
    for name in changed:
        if name in clean:
            environment[name] = clean[name]
        else:
            del environment[name]
    return changed
