"""Changes of JSON schemas: so that the library llguidance takes them, or so that objects have only named properties.

llguidance refuses some schemas although it could obey them: `oneOf`, which it would only approximate by `anyOf`; `not`
of required properties; formats that it does not know; and `uniqueItems: false`, which demands nothing. What replaces
them here allows only values that the schema allows: where two alternatives could match at once, each one forbids a
property that the other requires. Dependencies between properties become alternatives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
_SAYS_WHAT = {"type", "$ref", "enum", "const", "anyOf", "oneOf", "allOf", "properties"}
FORMATS = {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
"""Values of `format` that llguidance enforces."""
MAX_COMPARISONS = 20_000
"""Most comparisons of two alternatives within one schema; a `oneOf` that needs more stays as it is."""
MAX_DEPTH = 8
_LISTS_NAMES = {"enum", "const", "type", "title", "description"}
_TYPES = frozenset({"null", "boolean", "object", "array", "number", "integer", "string"})
_TYPE_OF = {
    type(None): "null",
    bool: "boolean",
    dict: "object",
    list: "array",
    int: "integer",
    float: "number",
    str: "string",
}

Change = Callable[[dict[str, Any], str], dict[str, Any]]


def _changed(schema: Any, change: Change, path: str = "") -> Any:
    """Return a schema with each of its parts replaced by `change(part, path of the part)`, the innermost first.

    A path is a text such as properties/name, empty for a whole schema. `path` is that of the given schema.
    """
    if not isinstance(schema, dict):
        return schema
    new = dict(schema)
    for key, value in schema.items():
        at = f"{path}/{key}" if path else key
        if key in BY_NAME and isinstance(value, dict):
            new[key] = {name: _changed(part, change, f"{at}/{name}") for name, part in value.items()}
        elif key in _LISTS and isinstance(value, list):
            new[key] = [_changed(part, change, f"{at}/{i}") for i, part in enumerate(value)]
        elif key in _SINGLE:
            new[key] = _changed(value, change, at)
    return change(new, path)


def closed(schema: Any) -> Any:
    """Return a JSON schema made strict: objects may have only the properties that it names.

    Raises:
        ValueError: a part of it allows other properties, or has no type; the message names the part.
    """
    return _changed(schema, _close)


def _close(part: dict[str, Any], path: str) -> dict[str, Any]:
    where = path or "the schema"
    if path.rpartition("/")[0].rpartition("/")[2] != "allOf" and not _SAYS_WHAT & part.keys():
        raise ValueError(f"{where}: a strict schema needs a type here")
    if part.get("additionalProperties", False) is not False or part.get("patternProperties"):
        raise ValueError(f"{where}: additionalProperties must be false in a strict schema, without patternProperties")
    types = _types(part)
    if "array" in types and _SAYS_WHAT & part.keys() == {"type"} and part.get("items", True) is True:
        raise ValueError(f"{where}: items of an array must have a schema in a strict one")
    is_object = "properties" in part or ("object" in types and "type" in part)
    return {**part, "additionalProperties": False} if is_object else part


def adapted(schema: Any) -> Any:
    """Return `schema`, changed where llguidance would refuse it although it could enforce it.

    The result allows only values that `schema` allows, except that a `format` unknown to llguidance is dropped.
    """
    alternatives = _Alternatives(schema)

    def adapt(part: dict[str, Any], _: str) -> dict[str, Any]:
        kept = {key: value for key, value in part.items() if not _says_nothing(key, value)}
        refused = kept.get("not")
        if isinstance(refused, dict) and refused.keys() == {"required"}:
            name = next((each for each in _required(refused) if each not in _required(kept)), None)
            if name is not None:
                del kept["not"]
                kept = _without([name], kept)
        kept = alternatives.with_listed_names(kept)
        for keyword in ("dependencies", "dependentRequired"):
            kept = _separated_by_needs(keyword, kept)
        if "anyOf" not in kept and (separated := alternatives.separated(kept)) is not None:
            del kept["oneOf"]
            kept["anyOf"] = separated
        return kept

    return _changed(schema, adapt)


def _says_nothing(key: str, value: Any) -> bool:
    if key == "format" and isinstance(value, str):
        return value not in FORMATS
    return key == "uniqueItems" and value is False


def _separated_by_needs(keyword: str, part: dict[str, Any]) -> dict[str, Any]:
    """Return the schema `part` with alternatives in place of `keyword`, by which some properties require others.

    There are two alternatives for each such property: objects without it, or objects with all properties that it
    requires. A part without the keyword, or with one of another form, is returned unchanged.
    """
    needs, others = part.get(keyword), part.get("allOf", [])
    if not needs or not isinstance(needs, dict) or not all(isinstance(it, list) for it in (others, *needs.values())):
        return part
    either = [{"anyOf": [_without([name], {}), {"required": [name, *names]}]} for name, names in needs.items()]
    return {**{key: value for key, value in part.items() if key != keyword}, "allOf": [*others, *either]}


def _without(names: Collection[str], part: Any) -> Any:
    """Return a schema for those values of the schema `part` that are objects without any of the properties `names`.

    If there are no `names`, return `part` itself.
    """
    if not names:
        return part
    if not isinstance(part, dict) or "$ref" in part or not isinstance(part.get("properties", {}), dict):
        return {"allOf": [part, {"type": "object", "properties": dict.fromkeys(names, False)}]}
    return {**part, "type": "object", "properties": {**part.get("properties", {}), **dict.fromkeys(names, False)}}


class _Alternatives:
    """Rewriter of the alternatives of `oneOf` within the schema `root`, so that no value matches two of them."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_left = MAX_COMPARISONS

    def with_listed_names(self, part: dict[str, Any]) -> dict[str, Any]:
        """Return a schema in which `properties` replaces `propertyNames`, if that lists all names that are allowed.

        Return `part` itself if it has no such list.
        """
        listed = self._resolved(part.get("propertyNames"))
        names = _values(listed) if isinstance(listed, dict) and listed.keys() <= _LISTS_NAMES else None
        given, rest = part.get("properties", {}), part.get("additionalProperties", True)
        if names is None or "patternProperties" in part or not isinstance(given, dict):
            return part
        properties = {name: given.get(name, rest) for name in names if isinstance(name, str)}
        kept = {key: value for key, value in part.items() if key != "propertyNames"}
        closed_ = {**dict.fromkeys(given, False), **properties}
        return {**kept, "type": "object", "properties": closed_, "additionalProperties": False}

    def separated(self, part: dict[str, Any]) -> list[Any] | None:
        """Return the alternatives of a part's `oneOf`, changed so that no value matches two of them.

        Return None if there is no `oneOf`, or if the alternatives are hard to distinguish.
        """
        alternatives = part.get("oneOf")
        if not isinstance(alternatives, list):
            return None
        common: dict[str, Any] = {key: part[key] for key in ("type", "required") if key in part}
        lacking: list[list[str]] = [[] for _ in alternatives]
        for i, k in itertools.combinations(range(len(alternatives)), 2):
            if self._differ(common, alternatives[i], alternatives[k]):
                continue
            own, others = ([*_required(self._resolved(alternatives[each]))] for each in (i, k))
            known = {*_required(common)}
            only_own = next((name for name in own if name not in {*others, *known}), None)
            only_others = next((name for name in others if name not in {*own, *known}), None)
            if only_own is None or only_others is None or self._num_left < 0:
                return None
            lacking[i].append(only_others)
            lacking[k].append(only_own)
        return [_without(names, each) for names, each in zip(lacking, alternatives, strict=True)]

    def _differ(self, common: dict[str, Any], one: Any, other: Any, depth: int = 0) -> bool:
        """Return whether no value matches both schemas `one` and `other`; False if that is hard to prove.

        Args:
            common: keywords of the part around both, which hold for each.
            depth: number of properties around the schemas that are compared.
        """
        one, other = self._resolved(one), self._resolved(other)
        if one is False or other is False:
            return True
        self._num_left -= 1
        if not isinstance(one, dict) or not isinstance(other, dict) or self._num_left < 0 or depth > MAX_DEPTH:
            return False
        one, other = {**common, **one}, {**common, **other}
        types = _types(one) & _types(other)
        if not types or self._have_other_values(one, other):
            return True
        names = dict.fromkeys([*_required(common), *_required(one), *_required(other)])
        return types == {"object"} and any(self._differ_in(name, one, other, depth + 1) for name in names)

    def _have_other_values(self, one: dict[str, Any], other: dict[str, Any]) -> bool:
        values, others = _values(one), _values(other)
        if values is None or others is None:
            return False
        self._num_left -= len(values) * len(others)
        return self._num_left > 0 and not any(each in others for each in values)

    def _differ_in(self, name: str, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        part, others = _property(name, one), _property(name, other)
        return False in (part, others) or (None not in (part, others) and self._differ({}, part, others, depth))

    def _resolved(self, schema: Any) -> Any:
        """Return the schema that a `$ref` within the document points at, or the schema itself if it has none."""
        for _ in range(8):
            if not isinstance(schema, dict) or not str(schema.get("$ref", "")).startswith("#/"):
                break
            target = self._root
            for step in schema["$ref"][2:].split("/"):
                target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
            schema = target
        return schema


def _types(part: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the types that a part's values may have; with "number" also "integer"."""
    given = part.get("type")
    if (values := _values(part)) is not None:
        given = [_TYPE_OF[type(each)] for each in values]
    named = [given] if isinstance(given, str) else given if isinstance(given, list) else _TYPES
    types = frozenset(each for each in named if isinstance(each, str))
    return types | {"integer"} if "number" in types else types


def _values(part: Mapping[str, Any]) -> list[Any] | None:
    """Return the values that a part lists by `const` or `enum`; None if it lists none."""
    if "const" in part:
        return [part["const"]]
    return part["enum"] if isinstance(part.get("enum"), list) else None


def _required(part: Any) -> Iterable[str]:
    names = part.get("required") if isinstance(part, dict) else None
    return filter(lambda each: isinstance(each, str), names) if isinstance(names, list) else ()


def _property(name: str, part: Mapping[str, Any]) -> Any:
    """Return the schema that `part`, the schema of an object, has for a property.

    False means that `part` forbids the property, None that it says nothing about it.
    """
    properties = part.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return False if part.get("additionalProperties") is False and "patternProperties" not in part else None
