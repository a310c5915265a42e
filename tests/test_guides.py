"""The guides in docs/ name flags that exist, and the planner's table of flags is complete."""

import dataclasses
import pathlib
import re

import pytest

from experiments.plan import Flags
from rljax import planning
from rljax.config import Config

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def names(part):
    return {field.name for field in dataclasses.fields(part)}


TRAIN = {name for part in vars(Config()).values() for name in names(part)}
PLAN = names(Flags) | names(planning.Work)


@pytest.mark.parametrize("page", ["meshes.md", "planning.md"])
def test_guides_name_flags_that_exist(page):
    text = (DOCS / page).read_text(encoding="utf-8")
    assert set(re.findall(r"(?<![\w=-])--([a-z]\w+)", text)) <= (
        TRAIN if page == "meshes.md" else PLAN
    )


def test_the_table_of_the_planner_has_all_its_flags_and_defaults():
    text = (DOCS / "planning.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", text, re.MULTILINE)
    table = {}
    for flags, defaults in rows:
        flags = re.findall(r"--(\w+)", flags)
        defaults = re.split(", ", defaults.strip("` "))
        table |= dict(
            zip(flags, defaults if len(defaults) == len(flags) else [""] * len(flags), strict=True)
        )
    assert set(table) == PLAN
    for field in dataclasses.fields(planning.Work):
        assert table[field.name] == str(field.default)
