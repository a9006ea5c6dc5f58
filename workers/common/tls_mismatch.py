"""Finds out from gRPC's words why TLS between two of our processes failed. No torch, no gRPC."""

from .errors import TlsMismatch, WorkerLost

_SAME = "give all processes the same `tls` settings (of a worker that was started by hand: --tls-ca, -cert and -key)"


def lost(what: str, details: str) -> WorkerLost:
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
