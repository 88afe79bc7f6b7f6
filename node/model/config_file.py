"""Read a Hugging Face config.json as the keys of [model].

A key of config.json may change what a model computes. So every key must be known: it is one of ours, has the only value
that we support, or has no effect on weights and logits.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from node.model.config_keys import ConfigKeys, join_faults, read_json_object
from node.model.families import FAMILIES
from node.model.interface import ModelFamily
from protocol.errors import ManifestError
from protocol.fault_words import shorten
from protocol.manifest.model import OWN_KEYS, RopeScaling

CONFIG_FILE: Final = "config.json"
ROPE_TABLES: Final = ("rope_scaling", "rope_parameters")  # of transformers 4 and 5
Json = dict[str, Any]


def read_config(path: Path) -> Json:
    """Return the values of [model] that a config.json describes.

    Raises:
        MissingFileError: it cannot be read.
        ManifestError: it describes no model that we can train; one line names each key.
    """
    config = read_json_object(path, "name a config.json of Hugging Face")
    family, keys = _family_of(config, path)
    config = {keys.aliases.get(name, name): value for name, value in config.items()}
    faults = list(_faults(config, keys))
    if faults:
        raise ManifestError(f"{path}: {join_faults(faults)}")
    return {"kind": family.kind} | dict(_values(config, keys))


def _family_of(config: Json, path: Path) -> tuple[ModelFamily, ConfigKeys]:
    known = [(family, family.config_keys) for family in FAMILIES.values() if family.config_keys is not None]
    kind, classes = config.get("model_type"), config.get("architectures") or []
    for family, keys in known:
        if kind == keys.model_type and (not classes or classes == [keys.architecture]):
            return family, keys
    found = ", ".join(map(str, classes)) if isinstance(classes, list) and classes else str(kind)
    names = ", ".join(sorted(keys.architecture for _, keys in known))
    raise ManifestError(f"{path}: the architecture {shorten(found)} is not supported; use one of {names}")


def _faults(config: Json, keys: ConfigKeys) -> Iterator[str]:
    """Yield what keeps us from training this model."""
    yield from (f"the key {name} is missing" for name in keys.sizes if config.get(name) is None)
    for name, value in config.items():
        if name in keys.fixed:
            if value not in keys.fixed[name]:
                yield f"{name} = {json.dumps(value)} is not supported, only {json.dumps(keys.fixed[name][0])}"
        elif name == "layer_types":
            if value is not None and not (isinstance(value, list) and all(each == "full_attention" for each in value)):
                yield "layer_types other than full_attention are not supported"
        elif name == "sliding_window":
            if value is not None and config.get("use_sliding_window") is not False:
                yield "a sliding_window is not supported"
        elif name not in keys.sizes and name not in keys.options and name not in keys.without_effect:
            yield f"the key {name} is not known; remove it if it changes nothing in the model"
    yield from _rope_faults(config)


def _rope_faults(config: Json) -> Iterator[str]:
    """Yield what is wrong with the scaling of positions as a whole; the manifest checks its values."""
    for name in ROPE_TABLES:
        table = config.get(name) or {}
        if not isinstance(table, dict):
            yield f"{name} is not a table"
            continue
        kind = rope_type(table)
        if kind not in ("default", *OWN_KEYS):
            yield f"{name} of the type {shorten(str(kind))} is not supported, only default, {', '.join(OWN_KEYS)}"
        elif others := sorted(table.keys() - {"type", "rope_theta", *RopeScaling.model_fields}):
            yield f"{name} has the key {shorten(others[0])}, which is not supported"
    if all(isinstance(config.get(name), dict) for name in ROPE_TABLES):
        first, second = (_rope_scaling(config, name) for name in ROPE_TABLES)
        if first != second:
            yield "rope_scaling and rope_parameters differ; remove one of them"
    bases = list(_rope_bases(config))
    if any(base != bases[0] for base in bases):
        found = " and ".join(shorten(json.dumps(base)) for base in bases)
        yield f"rope_theta is {found}, of which versions of transformers take one or the other; remove the wrong one"


def _rope_bases(config: Json) -> Iterator[object]:
    """Yield the base of the positions as each place of a config.json has it."""
    for table in (config, *(config.get(name) for name in ROPE_TABLES)):
        if isinstance(table, dict) and table.get("rope_theta") is not None:
            yield table["rope_theta"]


def rope_type(table: Json) -> object:
    """Return the kind of scaling, which has had two names."""
    return table.get("rope_type", table.get("type", "default"))


def _rope_scaling(config: Json, name: str) -> Json | None:
    """Return the table of the manifest for one of config.json; None if positions are not scaled."""
    table = config.get(name) or {}
    kind = rope_type(table)
    if kind == "default":
        return None
    values = {key: value for key, value in table.items() if key not in ("type", "rope_theta") and value is not None}
    if kind in ("llama3", "yarn"):
        values.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return values | {"rope_type": kind}


def _values(config: Json, keys: ConfigKeys) -> Iterator[tuple[str, object]]:
    for theirs, ours in {**keys.sizes, **keys.options}.items():
        value = config.get(theirs)
        value = keys.defaults.get(ours) if value is None else value
        if value is not None:
            yield ours, value
    yield "rope_theta", next(_rope_bases(config), 10_000.0)
    for name in ROPE_TABLES:
        if scaling := _rope_scaling(config, name):
            yield "rope_scaling", scaling
