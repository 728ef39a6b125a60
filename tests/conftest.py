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


@pytest.fixture(scope="module")
def compile_fast():
    """For tests that run what they compile for a moment only."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
