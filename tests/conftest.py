import children
import pytest


@pytest.fixture(scope="session")
def server(tmp_path_factory, pytestconfig):
    """Starts children: see children.py."""
    server = children.start_server(
        tmp_path_factory.mktemp("server"), pytestconfig.cache.mkdir("compiled")
    )
    yield server
    server.stop()
