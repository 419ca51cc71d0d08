"""What is refused or warned of before anything is served: threat S35."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from executor import footing


def installed(base: Path, version: str | None, *, extension: bool = True) -> list[str]:
    """A directory of packages with an aiohttp in it, as much of one as is looked at."""
    (base / "aiohttp").mkdir(parents=True)
    (base / "aiohttp" / "__init__.py").touch()
    if extension:
        (base / "aiohttp" / "_http_parser.abi3.so").touch()
    else:
        (base / "aiohttp" / "_http_parser.pyx").touch()
    if version is not None:
        (base / f"aiohttp-{version}.dist-info").mkdir()
    return [str(base)]


def test_this_installation_is_good_enough_to_serve() -> None:
    assert footing.examine({}) == ([], [])


def test_the_floor_is_the_one_that_packages_are_told() -> None:
    project = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())
    floor = ".".join(map(str, footing.AIOHTTP_FLOOR))
    assert f"aiohttp>={floor}" in project["project"]["dependencies"]


@pytest.mark.parametrize("version", ["3.14.4", "3.9.0", "2.0.0"])
def test_an_aiohttp_below_the_floor_is_refused(tmp_path: Path, version: str) -> None:
    refusals, _ = footing.examine({}, installed(tmp_path / "p", version))
    assert refusals == [f"aiohttp {version} has known holes: 3.14.5 or later is needed"]


@pytest.mark.parametrize("version", ["3.14.5", "3.14.10", "3.20.0", "4.0.0rc1", None])
def test_the_floor_and_later_ones_are_taken(tmp_path: Path, version: str | None) -> None:
    assert footing.examine({}, installed(tmp_path / "p", version)) == ([], [])


def test_an_aiohttp_without_its_parser_in_c_is_refused(tmp_path: Path) -> None:
    refusals, _ = footing.examine({}, installed(tmp_path / "p", "3.14.5", extension=False))
    assert len(refusals) == 1
    assert "parser in C is missing" in refusals[0]


def test_no_aiohttp_at_all_is_said(tmp_path: Path) -> None:
    assert footing.examine({}, [str(tmp_path)])[0] == ["aiohttp is not installed"]


def test_the_setting_that_asks_for_the_laxer_parser_is_taken_away_loudly() -> None:
    environ = {"AIOHTTP_NO_EXTENSIONS": "1", "OTHER": "x"}
    refusals, warnings = footing.examine(environ)
    assert (refusals, environ) == ([], {"OTHER": "x"})
    assert len(warnings) == 1
    assert "AIOHTTP_NO_EXTENSIONS is set and ignored" in warnings[0]
    assert footing.examine({"AIOHTTP_NO_EXTENSIONS": ""}) == ([], [])


@pytest.mark.parametrize(("version", "is_old"), [
    ((3, 11, 12), True), ((3, 11, 13), False), ((3, 12, 10), True), ((3, 12, 11), False), ((3, 13, 3), True),
    ((3, 13, 4), False), ((3, 14, 0), False),
])  # fmt: skip
def test_an_old_patch_level_of_python_is_said(version: tuple[int, ...], is_old: bool) -> None:
    assert (footing.outdated_python(version) is not None) is is_old
