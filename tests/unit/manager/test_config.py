"""Settings: where they come from, what they take, and what refuses to start."""

from __future__ import annotations

from pathlib import Path

import pytest

from manager.config import DEFAULT_PROFILE, SETTINGS, BadConfig, ManagerConfig, size_bytes
from manager.model import Owner, PoolSize


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sojourn.toml"
    path.write_text(text)
    return path


def test_without_anything_given_the_defaults_are_those_of_the_interface() -> None:
    config = ManagerConfig.load({})
    assert (config.host, config.port) == ("127.0.0.1", 8780)
    assert (config.active_ttl_sec, config.idle_ttl_sec, config.max_ttl_sec) == (7200, 1800, 86_400)
    assert config.cleanup_secret is None
    assert [profile.name for profile in config.profiles] == [DEFAULT_PROFILE]


def test_a_flag_wins_over_the_environment_and_that_over_the_file_and_each_origin_is_told(tmp_path: Path) -> None:
    path = written(tmp_path, 'port = 1001\nhost = "file"\nidle_ttl_sec = 10\n')
    env = {"SOJOURN_PORT": "1002", "SOJOURN_HOST": "environment"}
    config = ManagerConfig.load(env, {"port": 1003, "host": None}, file=path)
    assert (config.port, config.host, config.idle_ttl_sec) == (1003, "environment", 10)
    assert config.origins["port"] == "flag --port"
    assert config.origins["host"] == "environment SOJOURN_HOST"
    assert config.origins["idle_ttl_sec"] == f"file {path}"
    assert config.origins["active_ttl_sec"] == "default"


def test_the_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    path = written(tmp_path, "port = 1001\n")
    assert ManagerConfig.load({"SOJOURN_CONFIG": str(path)}).port == 1001


@pytest.mark.parametrize("name", ["SANDBOX_TASK_IDLE_TTL", "SANDBOX_TASK_ACTIVE_TTL", "SANDBOX_TASK_MAX_TTL"])
@pytest.mark.parametrize("value", ["0", "-1", "1.5", "ten", "1e3", "٣", "99999999999999999999", " 5"])
def test_a_lease_length_that_is_no_whole_number_of_seconds_over_0_refuses_to_start(name: str, value: str) -> None:
    with pytest.raises(BadConfig, match=f"environment {name}.*must be a whole number of seconds"):
        ManagerConfig.load({name: value})


def test_an_empty_variable_counts_as_unset() -> None:
    config = ManagerConfig.load({"SANDBOX_TASK_IDLE_TTL": "", "SANDBOX_CLEANUP_AUTH_SECRET": ""})
    assert config.idle_ttl_sec == 1800
    assert config.cleanup_secret is None


def test_a_boolean_in_the_file_is_no_number(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="port"):
        ManagerConfig.load({}, file=written(tmp_path, "port = true\n"))


def test_an_unknown_setting_in_the_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="there is no setting prot"):
        ManagerConfig.load({}, file=written(tmp_path, "prot = 1\n"))


def test_a_secret_comes_from_a_file_named_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("from-a-file\n")
    config = ManagerConfig.load({"SANDBOX_CLEANUP_AUTH_SECRET_FILE": str(tmp_path / "secret")})
    assert config.cleanup_secret == "from-a-file"
    with pytest.raises(BadConfig, match="cannot be read"):
        ManagerConfig.load({"SANDBOX_CLEANUP_AUTH_SECRET_FILE": str(tmp_path / "nothing")})


def test_no_secret_can_be_given_as_a_flag() -> None:
    assert [setting.field for setting in SETTINGS if setting.secret and setting.flag] == []


def test_secrets_never_stand_in_the_description_or_in_an_error(tmp_path: Path) -> None:
    secrets = [setting.env for setting in SETTINGS if setting.secret and setting.env]
    env = {name: f"redis://user:canary-{n}@host" for n, name in enumerate(secrets)}
    assert len(env) == 4
    assert "canary" not in ManagerConfig.load(env).describe()
    with pytest.raises(BadConfig) as refused:
        ManagerConfig.load({"SOJOURN_MANAGER_SECRET": "canary\nsecond line"})
    assert "canary" not in str(refused.value)


def test_the_description_tells_every_setting_with_its_origin_and_can_be_read_as_a_file(tmp_path: Path) -> None:
    text = ManagerConfig.load({"SOJOURN_PORT": "7"}).describe()
    assert "port = 7  # SOJOURN_PORT, environment SOJOURN_PORT" in text
    for setting in SETTINGS:
        assert f"\n{setting.field} = " in f"\n{text}"


def test_metrics_are_on_the_port_after_unless_told_otherwise() -> None:
    assert ManagerConfig.load({"SOJOURN_PORT": "9000"}).metrics_port == 9001
    assert ManagerConfig.load({"SOJOURN_PORT": "0"}).metrics_port == 0
    assert ManagerConfig.load({"SOJOURN_METRICS_PORT": "off"}).metrics_port is None


@pytest.mark.parametrize(
    ("value", "size"), [("1Gi", 1 << 30), ("512Mi", 512 << 20), ("10G", 10**10), ("7", 7), (4096, 4096), ("2Ki", 2048)]
)
def test_sizes_are_read_with_their_units(value: str | int, size: int) -> None:
    assert size_bytes(value) == size


@pytest.mark.parametrize("value", ["", "0", "-1Gi", "1.5Gi", "1 Gi", "1gi", "1Pi", "inf", 0, -1, True, 1.5, None])
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be a size over 0"):
        size_bytes(value)


PROFILES = """
[[profiles]]
name = "small"
cpu = 0.5
memory = "256Mi"
pids = 64
disk = "1Gi"
network = "outbound"
bandwidth = "2Mi"
connections = 32
pool = { min = 1, max = 3 }
idle_ttl_sec = 60
[projects."acme/web"]
profiles = ["small", "sandboxes-default"]
concurrency = 20
cpu = 6
memory = "8Gi"
"""


def test_profiles_and_projects_are_read_and_the_default_profile_is_always_there(tmp_path: Path) -> None:
    config = ManagerConfig.load({}, file=written(tmp_path, PROFILES))
    assert [profile.name for profile in config.profiles] == [DEFAULT_PROFILE, "small"]
    small = config.profiles[1]
    assert (small.cpu, small.memory_bytes, small.pids, small.disk_bytes) == (0.5, 256 << 20, 64, 1 << 30)
    assert (small.network, small.bandwidth_bytes_sec, small.connections) == ("outbound", 2 << 20, 32)
    assert (small.pool_min, small.pool_max, small.idle_sec) == (1, 3, 60)
    assert (small.pool.utilisation, small.pool.shrink_sec) == (0.7, 600.0)
    policy = config.policy(Owner("acme", "web"))
    assert (policy.profiles, policy.concurrency) == (("small", DEFAULT_PROFILE), 20)
    assert (policy.cpu, policy.memory_bytes) == (6.0, 8 << 30)
    assert config.policy(Owner("other", "project")).profiles == (DEFAULT_PROFILE,)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("", PoolSize(min=2, max=2)),
        ("pool = { size = 5 }", PoolSize(min=5, max=5)),
        ("pool = { min = 3 }", PoolSize(min=3, max=3)),
        ("pool = { max = 30 }", PoolSize(min=2, max=30)),
        ("pool = { max = 1 }", PoolSize(min=1, max=1)),
        ("pool = { size = 0 }", PoolSize(min=0, max=0)),
        (
            "pool = { min = 0, max = 9, utilisation = 0.5, shrink_sec = 60 }",
            PoolSize(min=0, max=9, utilisation=0.5, shrink_sec=60.0),
        ),
    ],
)
def test_a_pool_has_a_size_or_a_least_and_a_most(tmp_path: Path, text: str, size: PoolSize) -> None:
    config = ManagerConfig.load({}, file=written(tmp_path, f'[[profiles]]\nname = "a"\n{text}\n'))
    assert config.profiles[1].pool == size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[profiles]]\nname = "a"\nimagee = "x"', "imagee"),
        ('[[profiles]]\nname = "a/b"', "a/b"),
        ('[[profiles]]\nname = "a"\n[[profiles]]\nname = "a"', "twice"),
        ('[[profiles]]\nname = "a"\nmemory = "lots"', "memory"),
        ('[[profiles]]\nname = "a"\ncpu = -1', "cpu"),
        ('[[profiles]]\nname = "a"\npool = {min = 3, max = 2}', "min <= max"),
        ('[[profiles]]\nname = "a"\npool = {size = 3, max = 4}', "a size, or a min and a max, not both"),
        ('[[profiles]]\nname = "a"\npool = {size = -1}', "size must be a number of pods from 0 to 10000"),
        ('[[profiles]]\nname = "a"\npool = {max = 10001}', "max must be a number of pods"),
        ('[[profiles]]\nname = "a"\npool = {min = 1, max = 3, utilisation = 0}', "a share from 0.1 to 1, not 0"),
        ('[[profiles]]\nname = "a"\npool = {min = 1, max = 3, utilisation = 70}', "a share from 0.1 to 1, not 70"),
        ('[[profiles]]\nname = "a"\npool = {min = 1, max = 3, shrink_sec = 1}', "seconds from 10 to 86400"),
        ('[[profiles]]\nname = "a"\npool = {size = 3, utilisation = 0.5}', "give it a max over its min"),
        ('[[profiles]]\nname = "a"\npool = {min = 1, maximum = 3}', "maximum"),
        ('[[profiles]]\nname = "a"\nidle_ttl_sec = 0', "idle_ttl_sec"),
        ('[[profiles]]\nname = "a"\ntarget = "moon"', "moon"),
        ('[[profiles]]\nname = "a"\nbandwidth = "1Mi"', 'network = "outbound"'),
        ('[[profiles]]\nname = "a"\nconnections = 5', 'network = "outbound"'),
        ('[[profiles]]\nname = "a"\nnetwork = "outbound"\nconnections = 0', "connections"),
        ('[[profiles]]\nname = "a"\nnetwork = "outbound"\nbandwidth = 100', "bandwidth"),
        ('[[profiles]]\nname = "a"\nnetwork = "outbound"\nbandwidth = "fast"', "bandwidth"),
        ('[projects."acme"]\nconcurrency = 1', "<tenant>/<project>"),
        ('[projects."acme/web"]\nprofiles = ["nope"]', "nope"),
        ('[projects."acme/web"]\nconcurrency = 0', "concurrency"),
        ('[projects."acme/web"]\ncpu = 0', "cpu"),
        ('[projects."acme/web"]\nmemory = "some"', "memory"),
        ('[[profiles]]\nname = "wide"\ncpu = 4\n[projects."acme/web"]\nprofiles = ["wide"]\ncpu = 2', "never fits"),
        ("targets = []", "at least one"),
        ('[[targets]]\nname = "a"\nprovider = "cloud"', "provider"),
        ("port = [", "sojourn.toml"),
    ],
)
def test_tables_that_make_no_sense_are_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(BadConfig, match=words):
        ManagerConfig.load({}, file=written(tmp_path, text))


def test_the_way_outward_is_the_operators(tmp_path: Path) -> None:
    text = 'outbound = "proxy"\noutbound_refused = ["198.51.100.0/24", "2001:db8::/32"]\noutbound_ports = [80, 8443]\n'
    config = ManagerConfig.load({"SOJOURN_OUTBOUND_RESOLVERS": "9.9.9.9, 1.0.0.1"}, file=written(tmp_path, text))
    assert (config.outbound, config.outbound_range) == ("proxy", "10.213.0.0/16")
    assert config.outbound_refused == ("198.51.100.0/24", "2001:db8::/32")
    assert (config.outbound_ports, config.outbound_resolvers) == ((80, 8443), ("9.9.9.9", "1.0.0.1"))
    plain = ManagerConfig.load({}).profiles[0]
    assert (plain.network, plain.connections > 0, plain.bandwidth_bytes_sec > 0) == ("none", True, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SOJOURN_OUTBOUND", "open"), ("SOJOURN_OUTBOUND_RANGE", "11.0.0.0/16"),
        ("SOJOURN_OUTBOUND_RANGE", "10.0.0.1/8"),
        ("SOJOURN_OUTBOUND_RANGE", "10.0.0.0/30"), ("SOJOURN_OUTBOUND_RANGE", "fd00::/64"),
        ("SOJOURN_OUTBOUND_RANGE", "127.0.0.0/8"), ("SOJOURN_OUTBOUND_RESOLVERS", "10.0.0.2"),
        ("SOJOURN_OUTBOUND_RESOLVERS", "1.1.1.1,127.0.0.53"), ("SOJOURN_OUTBOUND_RESOLVERS", "dns.test"),
        ("SOJOURN_OUTBOUND_RESOLVERS", "2606:4700:4700::1111"), ("SOJOURN_OUTBOUND_REFUSED", "198.51.100.1/24"),
        ("SOJOURN_OUTBOUND_REFUSED", "here"), ("SOJOURN_OUTBOUND_PORTS", "80,0"), ("SOJOURN_OUTBOUND_PORTS", "http"),
    ],
)  # fmt: skip
def test_a_way_outward_that_makes_no_sense_refuses_to_start(name: str, value: str) -> None:
    with pytest.raises(BadConfig, match=name):
        ManagerConfig.load({name: value})


@pytest.mark.parametrize("region", ["", 'region = "eu"\n'])
def test_two_targets_of_one_region_refuse_to_start_and_both_are_named(tmp_path: Path, region: str) -> None:
    text = "".join(f'[[targets]]\nname = "{name}"\nprovider = "local"\n{region}' for name in ("first", "second"))
    with pytest.raises(BadConfig, match=r"'first' and 'second'"):
        ManagerConfig.load({}, file=written(tmp_path, text))


@pytest.mark.parametrize(
    "url", ["file:///var/objects", "s3://bucket", "s3://bucket/a/b?region=x", "gs://b/p", "az://c"]
)
def test_object_storage_is_one_line(url: str) -> None:
    assert ManagerConfig.load({"SOJOURN_OBJECTS": url}).objects == url


@pytest.mark.parametrize(
    "url",
    ["bucket", "/var/objects", "file://", "file:///", "file://host/x", "s3://", "http://b/p", "s3://key:secret@b"],
)
def test_object_storage_that_is_no_url_of_it_refuses_to_start(url: str) -> None:
    with pytest.raises(BadConfig, match=r"SOJOURN_OBJECTS.*s3://"):
        ManagerConfig.load({"SOJOURN_OBJECTS": url})
