"""The written documentation has a place for every setting and every error code, and the document for every route."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from executor import errors as executor_errors
from manager import __version__
from manager import errors as manager_errors
from manager.api.openapi import document
from manager.api.routes import ROUTES
from manager.api.wire import ERROR_CODES
from manager.config import SETTINGS, ManagerConfig

ROOT = Path(__file__).parent.parent.parent
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
ERRORS = (ROOT / "docs/errors.md").read_text()


HTTP_OWN = (408, 431)  # statuses of HTTP's own for requests that never became one of ours


def classes_of(root: type[Exception]) -> list[type[Exception]]:
    return [root, *(each for child in root.__subclasses__() for each in classes_of(child))]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.field)
def test_every_setting_of_the_manager_has_its_line(setting: object) -> None:
    known = {each.field: each for each in SETTINGS}[getattr(setting, "field", "")]
    line = next((line for line in CONFIGURATION.splitlines() if f"| `{known.field}` |" in line), None)
    assert line is not None
    assert known.env is None or f"`{known.env}`" in line
    assert ("(secret)" in line) is known.secret
    assert known.flag is None or f"`{known.flag}`" in line


def test_every_default_of_the_manager_is_the_one_that_is_written() -> None:
    defaults = ManagerConfig()
    for setting in SETTINGS:
        value = getattr(defaults, setting.field)
        if isinstance(value, int) and not isinstance(value, bool) and setting.field != "metrics_port":
            line = next(line for line in CONFIGURATION.splitlines() if f"| `{setting.field}` |" in line)
            assert line.split("|")[3].strip() == str(value)


def test_every_setting_of_the_executor_has_its_line() -> None:
    names = set(re.findall(r"SOJOURN_[A-Z_0-9]+", (ROOT / "executor/config.py").read_text()))
    assert len(names) > 10
    section = CONFIGURATION.split("## The executor")[1]
    assert {name for name in names if f"`{name}`" not in section} == set()


def test_no_line_tells_of_a_setting_that_is_not_there() -> None:
    source = "".join(path.read_text() for path in (*ROOT.glob("executor/**/*.py"), *ROOT.glob("manager/**/*.py")))
    source += "".join(path.read_text() for path in ROOT.glob("sdk/src/**/*.py"))
    for name in set(re.findall(r"`((?:SOJOURN|SANDBOX)_[A-Z_0-9]+)`", CONFIGURATION)):
        assert name in source


def test_every_error_code_has_its_line_and_no_other_has_one() -> None:
    written = dict(re.findall(r"^\| `([a-z_0-9]+)` \| (\d+) \|", ERRORS, re.MULTILINE))
    assert {code: int(status) for code, status in written.items()} == ERROR_CODES


def test_every_error_class_of_both_programs_has_a_code_and_status_of_the_table() -> None:
    for root in (manager_errors.ManagerError, executor_errors.ExecutorError):
        for kind in classes_of(root):
            code, status = getattr(kind, "code", ""), getattr(kind, "status", 0)
            assert status in {ERROR_CODES.get(code), *(HTTP_OWN if code == "invalid_request" else ())}, kind


def test_every_error_code_is_one_that_some_route_tells_of() -> None:
    described = {
        code
        for operations in document(ROUTES, "0")["paths"].values()
        for operation in operations.values()
        for reply in operation["responses"].values()
        for code in reply["description"].split(", ")
    }
    assert set(ERROR_CODES) - described == set()


def test_every_route_has_its_place_in_the_document() -> None:
    paths = document(ROUTES, "0")["paths"]
    for route in ROUTES:
        assert paths[route.template][route.method.lower()]["summary"] == route.summary
        assert len(route.summary) > 10


def test_the_version_is_the_packages() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == __version__
