"""Where the client finds its server and key."""

from __future__ import annotations

from pathlib import Path

import pytest

from sojourn.config import Server, find_server
from sojourn.errors import ConfigurationError


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    (tmp_path / "address").write_text("http://127.0.0.1:9999\n")
    (tmp_path / "api-key").write_text("local-key\n")
    return tmp_path


def test_arguments_come_before_everything(stack: Path) -> None:
    env = {"SANDBOX_GATEWAY_URL": "http://env", "SANDBOX_API_KEY": "env-key", "SOJOURN_DATA_DIR": str(stack)}
    found = find_server("http://given:1/", "given-key", env)
    assert found == Server(address="http://given:1", api_key="given-key")


def test_the_environment_comes_before_the_local_stack(stack: Path) -> None:
    env = {"SANDBOX_GATEWAY_URL": "https://env", "SANDBOX_API_KEY": "env-key", "SOJOURN_DATA_DIR": str(stack)}
    assert find_server(env=env) == Server(address="https://env", api_key="env-key")


def test_a_local_stack_is_found_by_its_data_directory(stack: Path) -> None:
    found = find_server(env={"SOJOURN_DATA_DIR": str(stack)})
    assert found == Server(address="http://127.0.0.1:9999", api_key="local-key")


def test_a_stack_that_left_no_address_is_looked_for_at_its_port(stack: Path) -> None:
    (stack / "address").unlink()
    env = {"SOJOURN_DATA_DIR": str(stack)}
    assert find_server(env=env).address == "http://127.0.0.1:8780"
    assert find_server(env={**env, "SOJOURN_PORT": "1234"}).address == "http://127.0.0.1:1234"


def test_the_local_key_is_never_sent_to_another_machine(stack: Path) -> None:
    with pytest.raises(ConfigurationError, match="SANDBOX_API_KEY"):
        find_server("https://elsewhere.example", env={"SOJOURN_DATA_DIR": str(stack)})


def test_nothing_configured_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="sojourn up"):
        find_server(env={"SOJOURN_DATA_DIR": str(tmp_path)})


@pytest.mark.parametrize("address", ["ftp://x", "127.0.0.1:8780", "http://", "http://h:port", "http://h:0"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigurationError, match="not an address"):
        find_server(address, "key", {})


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="characters"):
        find_server("http://h", "bad\nkey", {})


def test_a_key_is_not_shown_in_a_representation() -> None:
    assert "secret" not in repr(Server(address="http://h", api_key="secret"))
