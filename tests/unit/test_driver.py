"""Connection strings that libpq refuses by itself, and servers that do not answer."""

from __future__ import annotations

import asyncio

import pytest

from parapply.errors import ConfigError, SourceLost, TargetLost
from parapply.login import Login
from parapply.source import slot
from parapply.target.session import settings


def connect_source(dsn: str) -> None:
    """Open a session on a publisher."""
    asyncio.run(slot.connect(Login(dsn), application_name="test"))


def connect_target(dsn: str) -> None:
    """Open a session on a target."""
    asyncio.run(settings.connect_control(Login(dsn), role="replica", application_name="test"))


@pytest.mark.parametrize(
    "dsn",
    [
        "host=127.0.0.1 port=banana",
        "host=127.0.0.1 port=99999",
        "host=127.0.0.1,127.0.0.2 port=1,2,3",
        "host=127.0.0.1 sslmode=banana",
        "host=127.0.0.1 port=1 keepalives_idle=banana",
        "host=127.0.0.1 target_session_attrs=banana",
        "hostaddr=banana",
        "service=banana",
    ],
)
def test_what_libpq_refuses_is_an_error_of_the_configuration(dsn: str) -> None:
    """No server is asked and no later attempt can help, so the daemon ends with 2 and names the key."""
    with pytest.raises(ConfigError, match=r"^source\.dsn: .") as caught:
        connect_source(dsn)
    assert caught.value.hint
    with pytest.raises(ConfigError, match=r"^target\.dsn: ."):
        connect_target(dsn)


@pytest.mark.parametrize("dsn", ["host=127.0.0.1 port=1", "host=/nowhere", "host=nowhere.invalid"])
def test_a_server_that_is_not_there_is_tried_again(dsn: str) -> None:
    """A closed port, a socket that is gone and a name that cannot be resolved may come back."""
    with pytest.raises(SourceLost):
        connect_source(dsn)
    with pytest.raises(TargetLost):
        connect_target(dsn)
