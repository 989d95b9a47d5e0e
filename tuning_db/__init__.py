"""Tuned configurations, one JSON file per kind of device, and their reader. `xsake.autotune` writes them."""

from xsake.tuning_db.database import SCHEMA_VERSION, Database, Entry, UnknownSchema, UnreadableDatabase, file_name
from xsake.tuning_db.key import HADS, UNKNOWN_DENSITY, Key
from xsake.tuning_db.lookup import SHIPPED, Found, find, find_race, heuristics_only, overlay, user_directory

__all__ = [
    "HADS",
    "SCHEMA_VERSION",
    "SHIPPED",
    "UNKNOWN_DENSITY",
    "Database",
    "Entry",
    "Found",
    "Key",
    "UnknownSchema",
    "UnreadableDatabase",
    "file_name",
    "find",
    "find_race",
    "heuristics_only",
    "overlay",
    "user_directory",
]
