"""Printed kernels are cached in a folder of the test run's own."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE", str(tmp_path_factory.mktemp("kernels")))
        yield
