"""Reads what one part of Diptych logged: other threads of a test process (gRPC's) log too."""

import pytest


def messages_of(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    """Messages of one logger and its children."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == logger or record.name.startswith(f"{logger}.")
    ]
