"""Tests of ways to start Diptych on machines of one's own: `make launch`. Each needs root and a few Debian packages."""

import pytest

from ..support.machines import missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = missing()
    for item in items:
        if "/launch/" in item.nodeid and lacking:
            item.add_marker(pytest.mark.skip(reason=f"other machines cannot be made here without {', '.join(lacking)}"))
