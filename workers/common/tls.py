"""TLS between our own processes: both sides of a connection verify the other's certificate. No torch, no gRPC.

    TlsIdentity   certificate and key in memory, made by `make_identity` for one start of a cluster
    TlsFiles      paths, the same on every machine; a replaced file holds from the next connection on

A certificate must have the DNS name SERVER_NAME, whatever the address of the machine.
"""

import datetime
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import ConfigError, TlsMismatch, WorkerLost

if TYPE_CHECKING:  # imported where it is used: commands without TLS start without it
    from cryptography import x509

SERVER_NAME = "diptych"
VALID_FOR = datetime.timedelta(days=825)
CLOCKS_DIFFER = datetime.timedelta(hours=1)
_SAME = "give all processes the same `tls` settings (of a worker that was started by hand: --tls-ca, -cert and -key)"


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """PEM texts: the authority that peers must be of, and a certificate of it with its key."""

    ca: bytes = field(repr=False)
    cert: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def load(self) -> "TlsIdentity":
        return self

    @property
    def valid_until(self) -> datetime.datetime:
        from cryptography import x509

        return x509.load_pem_x509_certificate(self.cert).not_valid_after_utc

    def check(self) -> None:
        """Raises ConfigError for a certificate that peers would refuse, and for what is no certificate or key."""
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        try:
            cert = x509.load_pem_x509_certificate(self.cert)
            key = serialization.load_pem_private_key(self.key, password=None)
            chain = x509.load_pem_x509_certificates(self.cert)
            authorities = x509.load_pem_x509_certificates(self.ca)
        except (ValueError, TypeError) as e:
            raise ConfigError(
                f"tls: cannot parse the certificate, its key or the authority ({e}): give PEM files, the key without a "
                "password"
            ) from e
        if cert.public_key() != key.public_key():
            raise ConfigError("tls: the key is not the certificate's: give the key that it was made with")
        now = datetime.datetime.now(datetime.UTC)
        if not cert.not_valid_before_utc <= now < cert.not_valid_after_utc:
            raise ConfigError(
                f"tls: the certificate is valid from {cert.not_valid_before_utc:%Y-%m-%d %H:%M} to "
                f"{cert.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, not now: renew it, or set this machine's clock"
            )
        if SERVER_NAME not in _dns_names(cert):
            raise ConfigError(
                f"tls: the certificate lacks the DNS name {SERVER_NAME!r}: make one with it as subjectAltName"
            )
        if not _is_of(cert, chain[1:], authorities):
            raise ConfigError(
                "tls: the certificate is of none of the authorities in `ca`, so peers with the same files would refuse "
                "it: give the certificate of the authority that signed it"
            )


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files."""

    ca: str
    cert: str
    key: str

    def load(self) -> TlsIdentity:
        """Raises ConfigError for what cannot be read or would be refused by peers."""
        try:
            found = TlsIdentity(*(Path(path).read_bytes() for path in (self.ca, self.cert, self.key)))
        except OSError as e:
            raise ConfigError(f"tls: cannot read {e.filename}: {e.strerror}. Check the path") from e
        found.check()
        return found


LinkTls = TlsIdentity | TlsFiles


def valid_until(tls: LinkTls | None) -> str | None:
    """The end of the certificate, or what is wrong with it; None without TLS."""
    try:
        return f"{tls.load().valid_until:%Y-%m-%d %H:%M} UTC" if tls else None
    except ConfigError as e:
        return e.message


def lost_peer(what: str, details: str) -> WorkerLost:
    """Make the error of a peer that cannot be reached. `details`: gRPC's."""
    why = tls_problem(details)
    return WorkerLost(f"{what} ({details})") if why is None else TlsMismatch(f"{what}: {why}")


def tls_problem(details: str) -> str | None:
    """Return what is wrong and the remedy; None: it is not TLS."""
    if "WRONG_VERSION_NUMBER" in details:
        return f"it answers without TLS, and is called with it: {_SAME}"
    if "CERTIFICATE_VERIFY_FAILED" in details or "certificate signature failure" in details:
        if "has expired" in details or "not yet valid" in details:
            return "its certificate is not valid now: renew it, or set the clock of its machine"
        return f"its certificate is of another authority than ours: {_SAME}, with both authorities in `ca` for a change"
    if "failed to connect" in details and details.rstrip().endswith("Socket closed"):
        return (
            "it closed the connection at its beginning, as a worker with TLS does where it is called without, or with "
            f"a certificate of an authority that it does not know: {_SAME}"
        )
    return None


def server_certificate_end(setting: str, cert: Path, key: Path) -> datetime.datetime:
    """End of a certificate for clients. Raises ConfigError for files that a server could not use, or no longer."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    try:
        found = x509.load_pem_x509_certificate(cert.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except OSError as e:
        raise ConfigError(f"{setting}: cannot read {e.filename}: {e.strerror}. Check the path") from e
    except (ValueError, TypeError) as e:
        raise ConfigError(f"{setting}: cannot parse {cert} or {key} ({e}): give PEM files") from e
    if found.public_key() != private.public_key():
        raise ConfigError(f"{setting}: {key} is not the key of {cert}: give the key that it was made with")
    if found.not_valid_after_utc <= datetime.datetime.now(datetime.UTC):
        raise ConfigError(f"{setting}: {cert} has expired, on {found.not_valid_after_utc:%Y-%m-%d}: renew it")
    return found.not_valid_after_utc


def make_identity(cluster: str) -> TlsIdentity:
    """Make an authority and a certificate of it. The authority's key is not kept: it signs nothing else."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    def named(name: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    now = datetime.datetime.now(datetime.UTC)
    ca_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = named(f"diptych {cluster} authority")

    def builder(subject: x509.Name, public_key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
            .not_valid_before(now - CLOCKS_DIFFER)
            .not_valid_after(now + VALID_FOR)
        )

    ca = (
        builder(issuer, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    cert = (
        builder(named(f"diptych {cluster}"), key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return TlsIdentity(ca.public_bytes(pem), cert.public_bytes(pem), secret)


def _is_of(cert: "x509.Certificate", between: "list[x509.Certificate]", authorities: "list[x509.Certificate]") -> bool:
    """Return whether an authority has signed the certificate, or one of those `between` that has."""
    if cert in authorities or any(_has_signed(issuer, cert) for issuer in authorities):
        return True
    return any(
        _has_signed(issuer, cert) and _is_of(issuer, [c for c in between if c != issuer], authorities)
        for issuer in between
    )


def _has_signed(issuer: "x509.Certificate", cert: "x509.Certificate") -> bool:
    from cryptography.exceptions import InvalidSignature

    try:
        cert.verify_directly_issued_by(issuer)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def _dns_names(cert: "x509.Certificate") -> list[str]:
    from cryptography import x509

    try:
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return names.get_values_for_type(x509.DNSName)
