"""Certificates for tests of TLS."""

import datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dpipe.wire.rpc import TLS_NAME, Security


class Authority:
    """Signs certificates for the one name of a run."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = _sign(
            "authority", self._key.public_key(), "authority", self._key, authority=True
        )

    def security(self, token: str = "", valid_hours: float = 1.0) -> Security:
        key = ec.generate_private_key(ec.SECP256R1())
        cert = _sign(
            TLS_NAME, key.public_key(), "authority", self._key, valid_hours, authority=False
        )
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return Security(token, _pem(cert), pem, _pem(self._cert))


def _sign(
    name, public_key, issuer, issuer_key, valid_hours: float = 1.0, *, authority: bool
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=valid_hours))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )


def _pem(cert: x509.Certificate) -> bytes:
    return cert.public_bytes(serialization.Encoding.PEM)
