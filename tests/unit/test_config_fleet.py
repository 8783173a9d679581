"""The configuration of several databases: shared sections, templates of connection strings, slots, faults."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from parapply.config import Config, load_config
from parapply.config_fleet import Fleet, load, one_of, slot_name
from parapply.config_values import _slot
from parapply.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "s3cr3t-hunter2"
SHARED = f"""
[source]
dsn = "host=a user=u password={SECRET}"
slot = "app"
publications = ["app"]
[target]
dsn = "postgresql://u@b:6543/?sslmode=disable"
"""
#: Names that servers take.
HOSTILE = [
    'we"ird',
    "sp ace",
    "new\nline",
    "100%s",
    "größe",
    "it's",
    "back\\slash",
    "a=b",
    "postgresql://c/d",
    "-x",
    "../up",
]


def fleet_of(path: Path, databases: str, shared: str = SHARED, **environ: str) -> Fleet:
    """Return the fleet of a file."""
    path.write_text(databases + shared, encoding="utf-8")
    found = load(path, (), {}, environ)
    assert isinstance(found, Fleet)
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Place of a file."""
    return tmp_path / "fleet.toml"


def test_a_database_is_the_shared_sections_and_its_name(path: Path) -> None:
    """Names alone are enough: each is dbname of both templates, URIs too, and ends the slot's name."""
    fleet = fleet_of(path, 'databases = ["shop", "billing"]')
    assert [one.name for one in fleet.databases] == ["shop", "billing"]
    for one in fleet.databases:
        source, target = one.config.source, one.config.target
        assert source.slot == f"app_{one.name}"
        assert conninfo_to_dict(source.dsn.get_secret_value()) == {
            "host": "a", "user": "u", "password": SECRET, "dbname": one.name,
        }  # fmt: skip
        assert conninfo_to_dict(target.dsn.get_secret_value()) == {
            "host": "b", "port": "6543", "user": "u", "sslmode": "disable", "dbname": one.name,
        }  # fmt: skip


def test_an_entry_wins_over_all_that_is_shared(path: Path) -> None:
    """File, environment and the entry: the last wins, key by key, and parameter by parameter in connection strings."""
    own = """
[[databases]]
name = "shop"
apply.workers = 7
source.slot = "mine"
source.dsn = "host=c"
target.dsn = "dbname=shop_new"
[[databases]]
name = "billing"
"""
    environ = {"PARAPPLY_APPLY__WORKERS": "3", "PARAPPLY_SOURCE__DSN": f"host=e password={SECRET}"}
    shop, billing = fleet_of(path, "", SHARED + "[apply]\nworkers = 2\n" + own, **environ).databases
    assert (shop.config.apply.workers, billing.config.apply.workers) == (7, 3)
    assert (shop.config.source.slot, billing.config.source.slot) == ("mine", "app_billing")
    ends = [conninfo_to_dict(one.config.source.dsn.get_secret_value()) for one in (shop, billing)]
    assert [(end["host"], end["dbname"], end["password"]) for end in ends] == [
        ("c", "shop", SECRET), ("e", "billing", SECRET),
    ]  # fmt: skip
    assert conninfo_to_dict(shop.config.target.dsn.get_secret_value())["dbname"] == "shop_new"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_name_is_data(path: Path, name: str) -> None:
    """Every name that a server takes is the dbname, whole, and gives a slot that a publisher takes."""
    entry = "name = " + '"' + name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    (one,) = fleet_of(path, "", f"{SHARED}\n[[databases]]\n{entry}\n").databases
    for dsn in (one.config.source.dsn, one.config.target.dsn):
        parameters = conninfo_to_dict(dsn.get_secret_value())
        assert parameters["dbname"] == name
        assert parameters["host"] in {"a", "b"}
    assert re.fullmatch(r"app_[a-z0-9_]+_[0-9a-f]{8}", one.config.source.slot)


@given(n_prefix=st.integers(1, 63), one=st.text(min_size=1, max_size=70), other=st.text(min_size=1, max_size=70))
def test_slots_of_different_names_differ(n_prefix: int, one: str, other: str) -> None:
    """Each is a name that PostgreSQL takes for a slot."""
    slots = [slot_name("p" * n_prefix, name) for name in (one, other, one.upper(), f"{one}_")]
    assert (slots[0] == slots[1]) == (one == other)
    assert [_slot(slot) for slot in slots] == slots


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("databases = []", "databases: must be a list of names"),
        ("databases = 7", "databases: must be a list of names"),
        ('databases = ["a", 7]', r"databases \(number 2\): must be a name"),
        ('databases = ["a", "a"]', r"databases\.a: is named twice"),
        ('databases = [""]', r"databases \(number 1\): must be a name"),
        ('databases = [{name = "a", sorce = {}}]', r"databases\.a\.sorce: unknown key; did you mean source\?"),
        ('databases = [{name = "a", log = {level = "info"}}]', r"databases\.a\.log: belongs to the process"),
        ('databases = [{name = "a", source = 7}]', r"databases\.a\.source: must be a section"),
        ('databases = [{name = "a b", apply = {workers = 0}}]', r'databases\."a b": apply\.workers: must be a whole'),
        ('databases = [{name = "a", source = {dsn = "hst=1"}}]', r"databases\.a: source\.dsn: unknown parameter hst"),
        (
            'databases = [{name = "a", source = {dsn = "postgres://u:p@x/y@h"}}]',
            r"databases\.a: source\.dsn: must name",
        ),
        ('databases = ["a", {name = "b", source = {slot = "app_a"}}]', r"databases\.b: source\.slot: is also the slot"),
        (
            'databases = [{name = "a", apply = {max_batch_bytes = 33554432}}]',
            r"max_batch_bytes: must not be above 1677",
        ),
    ],
)
def test_faults_are_named_by_their_entry(path: Path, text: str, says: str) -> None:
    """Each fault is one line, with the entry that it is in, and no value of a secret."""
    path.write_text(text + SHARED, encoding="utf-8")
    with pytest.raises(ConfigError, match=says) as caught:
        load(path, (), {}, {})
    assert SECRET not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_totals_give_each_database_its_part(path: Path) -> None:
    """Less memory or fewer sessions than all databases always have are refused, with the least that would do."""
    databases = "databases = [" + ", ".join([f'"d{n}"' for n in range(10)]) + "]"
    totals = "\n[fleet]\nmax_connections = 59\nmemory_limit_bytes = 100000000\n"
    with pytest.raises(ConfigError) as caught:
        fleet_of(path, databases, SHARED + totals)
    memory, connections = str(caught.value).splitlines()
    assert memory == "fleet.memory_limit_bytes: must be at least 167772160 for 10 databases"
    assert connections == "fleet.max_connections: must be 0, or at least 60 for 10 databases"
    assert fleet_of(path, databases, SHARED + "\n[fleet]\nmax_connections = 60\n").totals.max_connections == 60


def test_a_command_about_one_database_names_it(path: Path) -> None:
    """It gets that database with the shared log; without a name, or with another one, it is refused."""
    found = fleet_of(path, 'databases = ["shop", "billing"]', SHARED + '[log]\nlevel = "error"\n')
    config = one_of(found, "billing")
    assert config.source.slot == "app_billing"
    assert config.log.level == "error"
    assert config.apply == Config().apply
    for name, says in ((None, "give --database NAME"), ("shp", "did you mean shop")):
        with pytest.raises(ConfigError, match=says):
            one_of(found, name)
    with pytest.raises(ConfigError, match="has no key databases"):
        one_of(Config(), "shop")


def test_a_loader_of_one_database_refuses_the_file(path: Path) -> None:
    """It would be a daemon of the template."""
    path.write_text('databases = ["shop"]' + SHARED, encoding="utf-8")
    with pytest.raises(ConfigError, match="needs a file of one"):
        load_config(path, environ={})
