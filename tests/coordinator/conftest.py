import datetime
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer
from dpipe.wire.rpc import TLS_NAME, Security


class Run:
    """A server and its ranks as threads; whatever is left of them is closed at the end."""

    def __init__(self) -> None:
        self.servers: list[CoordinatorServer] = []
        self.ranks: list[Coordinator] = []

    def serve(self, world_size: int, **settings) -> CoordinatorServer:
        self.servers.append(CoordinatorServer(world_size, **settings))
        return self.servers[-1]

    def join(self, rank: int, world_size: int, **settings) -> Coordinator:
        settings = {"shared": {}, "join_s": 20.0, **settings}
        address = settings.pop("address", None) or f"127.0.0.1:{self.servers[-1].port}"
        coordinator = Coordinator.join(address, rank, world_size, **settings)
        self.ranks.append(coordinator)
        return coordinator

    def meet(self, world_size: int, *, server: dict[str, object] | None = None, **settings) -> list[Coordinator]:
        self.serve(world_size, **(server or {}))
        joins = [lambda rank=rank: self.join(rank, world_size, **settings) for rank in range(world_size)]
        ranks = self.at_once(*joins)
        for error in ranks:
            if isinstance(error, Exception):
                raise error
        return ranks

    @staticmethod
    def at_once(*calls: Callable[[], object]) -> list:
        """What each call returns or raises, called in threads of their own."""
        with ThreadPoolExecutor(len(calls)) as pool:
            futures = [pool.submit(call) for call in calls]
            return [future.exception(60) or future.result() for future in futures]

    def close(self) -> None:
        for coordinator in self.ranks:
            coordinator.close()
        for server in self.servers:
            server.close(wait_s=0.0)


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.close()
    assert [t.name for t in threading.enumerate() if t.name.startswith("coordinat")] == []


class Authority:
    """Signs certificates for the one name of a run."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = _sign("authority", self._key.public_key(), "authority", self._key, authority=True)

    def security(self, token: str = "") -> Security:
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _sign(TLS_NAME, key.public_key(), "authority", self._key, authority=False)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return Security(token, _pem(cert), pem, _pem(self._cert))


def _sign(name, public_key, issuer, issuer_key, *, authority: bool) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)


@pytest.fixture
def authority() -> type[Authority]:
    return Authority
