"""What the executor and the manager stand on: an HTTP library and an interpreter without known holes.

Told from files alone, in a fraction of a millisecond, as the executor imports aiohttp only when it is needed. Standard
library only; the manager imports this too."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import MutableMapping, Sequence
from importlib.machinery import ExtensionFileLoader, PathFinder
from typing import Final

AIOHTTP_FLOOR: Final = (3, 14, 5)  # as in pyproject.toml; earlier ones have known ways to smuggle requests
# The patch level of each 3.x that the last known hole was closed in. A system's own Python may have it closed and be
# numbered lower, so a lower one is said and not refused.
PYTHON_FLOORS: Final = {11: 13, 12: 11, 13: 4}
PURE_PYTHON: Final = "AIOHTTP_NO_EXTENSIONS"


def examine(environ: MutableMapping[str, str], path: Sequence[str] | None = None) -> tuple[list[str], list[str]]:
    """(why not to start at all, what to say loudly), each a sentence.

    Takes AIOHTTP_NO_EXTENSIONS away, which would have aiohttp use its Python parser: it is laxer than the one in C."""
    refusals, warnings = [], []
    if environ.pop(PURE_PYTHON, ""):
        warnings.append(f"{PURE_PYTHON} is set and ignored: requests are parsed by aiohttp's parser in C alone")
    found = PathFinder.find_spec("aiohttp", path)
    if found is None or not found.submodule_search_locations:
        return ["aiohttp is not installed"], warnings
    home = found.submodule_search_locations[0]
    parser = PathFinder.find_spec("aiohttp._http_parser", [home])
    if parser is None or not isinstance(parser.loader, ExtensionFileLoader):
        refusals.append(f"aiohttp's parser in C is missing in {home}: install aiohttp from a wheel")
    version = _installed_version(os.path.dirname(home))
    if version is not None and version < AIOHTTP_FLOOR:
        has, needs = (".".join(map(str, one)) for one in (version, AIOHTTP_FLOOR))
        refusals.append(f"aiohttp {has} has known holes: {needs} or later is needed")
    return refusals, warnings


def outdated_python(version: tuple[int, ...] = sys.version_info[:3]) -> str | None:
    """Why this interpreter's patch level is a worry; None where it is none."""
    floor = PYTHON_FLOORS.get(version[1], 0)
    if version[2] >= floor:
        return None
    has, needs = ".".join(map(str, version)), f"{version[0]}.{version[1]}.{floor}"
    return f"Python {has} is older than {needs}: unless your system has closed its holes under that number, renew it"


def _installed_version(directory: str) -> tuple[int, ...] | None:
    """None where no package data lie beside it, as in the bundle, which is built from locked versions."""
    for name in os.listdir(directory):
        numbers = re.fullmatch(r"aiohttp-(\d+)\.(\d+)\.(\d+)[^-]*\.dist-info", name)
        if numbers:
            return tuple(map(int, numbers.groups()))
    return None
