"""Fixtures and switches of all tests."""

import datetime
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpipe.wire.rpc import TLS_NAME, Security
from netem.router import MODULES

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-golden", action="store_true", help="Accept what the tests see as the golden files.")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip(f"needs a CUDA GPU, and torch {torch.__version__} sees none")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden("name.txt", text)` compares with tests/golden/name.txt, or rewrites it where asked."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--rewrite-golden"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{name} has changed; if that is right: --rewrite-golden"

    return compare


@pytest.fixture(scope="session")
def possible() -> None:
    """A lab can be made here; where it cannot, that is a failure and not a silence."""
    if os.environ.get("DPIPE_NO_LAB") == "1":
        pytest.skip("DPIPE_NO_LAB=1: labs are not tested")
    missing = ["root"] if os.geteuid() else []
    programs = ("ip", "tc", "ping", "linux.uml", "insmod", "ethtool", "sshd")
    missing += [program for program in programs if not shutil.which(program)]
    missing += [] if list(MODULES.glob("*/kernel/net/sched/sch_netem.ko")) else [str(MODULES)]
    if missing:
        pytest.fail(
            f"a lab needs {', '.join(missing)}: run scripts/apt-lab as root, or set DPIPE_NO_LAB=1 to go without"
        )


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """On CPU a run repeats bit for bit at the same number of threads."""
    torch.set_num_threads(1)


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
