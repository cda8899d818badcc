"""A proxy that has no descriptor left serves whom it has, outlives it, and takes new clients when there are some."""

import resource
from contextlib import ExitStack, suppress

from tests.support.processes import Deployment, Workspace, wait_for
from tests.support.raw_client import dial
from tests.support.upstream import Upstream, plain
from tests.support.ways import Kind, Way


def test_a_proxy_outlives_the_end_of_its_descriptors(deployment: Deployment, workspace: Workspace, secret: str) -> None:
    proxy = deployment.start_proxy()
    process = proxy.served.process.pid
    try:
        with Upstream(deployment.upstream_ca) as upstream, ExitStack() as strangers:
            upstream.default = plain(b"served")
            workspace.credential("api", url=upstream.url, secret=secret)
            ticket, context = workspace.ticket("api"), deployment.client_context()
            through = Way(Kind.REVERSE, ticket, upstream.authority, "api", proxy, context)
            with through.open() as old:
                assert old.ask(through.request("GET", "/")).status == 200
                soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
                resource.prlimit(process, resource.RLIMIT_NOFILE, (proxy.served.open_descriptors() + 4, hard))
                for _ in range(40):
                    with suppress(OSError):
                        strangers.enter_context(dial(proxy.reverse_port))

                while_full = [old.ask(through.request("GET", "/")).status for _ in range(3)]
                resource.prlimit(process, resource.RLIMIT_NOFILE, (soft, hard))
                strangers.close()
                afterwards = wait_for(lambda: answer(through), timeout_seconds=15)

            assert while_full == [200, 200, 200]
            assert afterwards == 200
            assert proxy.served.process.poll() is None
            assert proxy.is_ready()
    finally:
        deployment.proxies.remove(proxy)
        proxy.served.stop()


def answer(through: Way) -> int | None:
    with suppress(Exception):
        return through.ask("GET", "/", timeout_seconds=2).status
    return None
