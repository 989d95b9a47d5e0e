"""The databases that are shipped: they follow the schema, and every entry is valid for its backend."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from xsake import tuning_db
from xsake._cli.tuning import problems_of
from xsake._op import registry, tuned
from xsake.tuning_db import Database

FILES = sorted(p for p in Path(tuning_db.SHIPPED).glob("*.json") if p.name != "schema.json")


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(json.loads((tuning_db.SHIPPED / "schema.json").read_text()))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_files_hold_to_the_schema(path):
    assert problems_of(path) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_entries_suit_their_backends(path):
    for entry in Database.read(path).entries:
        if entry.key.operation == tuning_db.HADS:
            continue  # `Entry.parse` has checked it
        backend = registry.get(entry.key.implementation)
        assert entry.key.direction in tuned.directions(backend)
        assert tuned.make_part(backend, entry.key.direction, entry.config)
