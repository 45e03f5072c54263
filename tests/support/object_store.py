"""A bucket on moto's server, which answers like S3."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

_ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@contextmanager
def bucket(name: str) -> Iterator[str]:
    """Its URL. The environment leads to the server, also for processes that are started meanwhile.

    The server looks for an object, and then writes it: of two that create one at the same moment
    both may succeed, which S3 rules out.
    """
    # Some seconds, which workers without these tests need not take.
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for key, value in _ENVIRONMENT.items():
                patch.setenv(key, value)
            patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
            boto3.client("s3").create_bucket(Bucket=name)
            yield f"s3://{name}"
    finally:
        server.stop()
