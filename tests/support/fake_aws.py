"""AWS to test against: moto's own server, over TLS, as many services as are asked for."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3
import trustme
from moto.moto_api._internal.models import moto_api_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

REGION = "eu-central-1"
KEYS_FILE = "[default]\naws_access_key_id = AKIAIOSFODNN7EXAMPLE\naws_secret_access_key = of-these-tests\n"


class FakeAws:
    def __init__(self, url: str, ca_file: str) -> None:
        self.url = url
        self._ca_file = ca_file

    def client(self, service: str) -> Any:
        """A client of the test's own, beside the one under test."""
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.url,
            aws_access_key_id="test",
            aws_secret_access_key="test",
            verify=self._ca_file,
        )


@contextmanager
def serving_aws(ca: trustme.CA, ca_file: str) -> Iterator[FakeAws]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ca.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    moto_api_backend.reset()
    app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True, ssl_context=context)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield FakeAws(f"https://127.0.0.1:{server.server_port}", ca_file)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
