"""Validate a tree of native settings: pydantic finds what is wrong, this file says it in the user's words.

Read ``resolve.py`` for what several settings say together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from shardwise.config.model import Config
from shardwise.config.words import nearest, show, suggestion

__all__ = ["Checked", "check", "native_keys"]

CHOSEN_BY_NAME = ("optimizer", "scheduler")

EXPECTED = MappingProxyType(
    {
        "int_type": "an integer",
        "int_from_float": "an integer",
        "float_type": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "string_type": "a string",
        "list_type": "a list",
        "model_type": "a section",
        "model_attributes_type": "a section",
    }
)
LIMITS = MappingProxyType(
    {
        "greater_than": ("more than", "gt"),
        "greater_than_equal": ("at least", "ge"),
        "less_than": ("less than", "lt"),
        "less_than_equal": ("at most", "le"),
    }
)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What validation found.

    Attributes:
        config: the settings without the sections in ``broken``.
        broken: names at the top whose values are wrong; unknown keys beside good values break nothing.
        problems: one line each.
    """

    config: Config
    broken: frozenset[str] = frozenset()
    problems: tuple[str, ...] = field(default=())


def check(
    tree: Mapping[str, Any],
    names: Mapping[str, str],
    doubtful: frozenset[str] = frozenset(),
    hints: Mapping[str, str] = MappingProxyType({}),
) -> Checked:
    """Validate a tree, and what remains of it without its wrong parts.

    Args:
        tree: nested dicts in native names.
        names: dotted native key -> the key as the user wrote it, where that differs.
        doubtful: native keys that were written, but wrongly, and so are not in the tree: they are not missing.
        hints: unknown key -> what to say of it, instead of the nearest valid one.
    """
    broken = {key.partition(".")[0] for key in doubtful}
    try:
        return Checked(config=Config.model_validate(tree), broken=frozenset(broken))
    except ValidationError as error:
        details = error.errors(include_url=False)
    valid = native_keys(tree)
    problems: dict[str, None] = {}  # an ordered set
    unknown = []
    for detail in details:
        location = list(detail["loc"])
        if len(location) > 1 and location[0] in CHOSEN_BY_NAME:
            del location[1]  # pydantic puts the name of the alternative there
        if detail["type"] == "extra_forbidden":
            unknown.append(location)
            key = ".".join(map(str, location))
            complaint = f"{key}: unknown key; {hints[key]}" if key in hints else _unknown(key, tree, names, valid)
            problems[complaint] = None
            continue
        broken.add(str(location[0]))
        key = _dotted(location)
        if detail["type"].startswith("union_tag"):  # without a choice, what no alternative has is unknown
            everywhere = native_keys()
            for name in detail["input"]:
                if f"{key}.{name}" not in everywhere:
                    problems[_unknown(f"{key}.{name}", {key: {}}, names, everywhere)] = None
        if (detail["type"] == "missing" and key in doubtful) or _is_other_branch(location, detail, tree):
            continue
        name, bracket, index = key.partition("[")
        problems[f"{names.get(name, name)}{bracket}{index}{_complaint(detail, key)}"] = None
    return Checked(config=_sound_part(tree, broken, unknown), broken=frozenset(broken), problems=tuple(problems))


def native_keys(tree: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return every dotted native key; of a section chosen by name, the keys of the choice in ``tree`` if it has one."""
    keys: list[str] = []
    for name, info in Config.model_fields.items():
        sections = _models(info.annotation)
        if not sections:
            keys.append(name)
            continue
        written = (tree or {}).get(name)
        choice = written.get("name") if isinstance(written, Mapping) else None
        chosen = [model for model in sections if name in CHOSEN_BY_NAME and choice in _choices(model)]
        for model in chosen or sections:
            keys.extend(f"{name}.{field_name}" for field_name in model.model_fields)
    return tuple(dict.fromkeys(keys))


def _models(annotation: Any) -> list[type[BaseModel]]:
    """Return the models inside an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [model for part in get_args(annotation) for model in _models(part)]
    return []


def _choices(model: type[BaseModel]) -> tuple[Any, ...]:
    annotation = model.model_fields["name"].annotation
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _dotted(location: list[int | str]) -> str:
    """Return ``section.field[index]``; what pydantic adds for the branch of a union is left out."""
    keys = [part for part in location if isinstance(part, str)][:2]
    return ".".join(keys) + "".join(f"[{part}]" for part in location if isinstance(part, int))


def _is_other_branch(location: list[int | str], detail: ErrorDetails, tree: Mapping[str, Any]) -> bool:
    """Whether an error speaks of the half of "a number or a list of numbers" that the user did not mean."""
    branches = [part for part in location[2:] if isinstance(part, str)]
    if not branches:
        return False
    value = tree[str(location[0])][location[1]]
    return branches[0].startswith("list") != isinstance(value, list)


def _unknown(key: str, tree: Mapping[str, Any], names: Mapping[str, str], valid: tuple[str, ...]) -> str:
    section = key.rpartition(".")[0]
    written = names.get(key, key)
    choice = tree[section].get("name") if section in CHOSEN_BY_NAME else None
    if written != key and choice is not None:  # the names of another tool: native ones would mislead
        return f"{written}: not a setting of {choice}"
    where = f" for {section} {choice}" if choice is not None else ""
    elsewhere = native_keys()
    hint = suggestion(key, (*valid, *elsewhere) if choice is None else valid)
    if choice is not None and key in elsewhere:
        hint = f"another {section} has it, {choice} has not"
    return f"{written}: unknown key{where}; {hint}"


def _complaint(detail: ErrorDetails, key: str) -> str:
    """Return what follows the key in a line of the error."""
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind in EXPECTED:
        return f": expected {EXPECTED[kind]}, got {show(value)}"
    if kind in LIMITS:
        words, limit = LIMITS[kind]
        bound = context[limit]
        return f": must be {words} {int(bound) if bound == int(bound) else bound}, got {show(value)}"
    if kind in ("too_short", "too_long"):
        number = context.get("min_length", context.get("max_length"))
        items = "at least 1 item" if number == 1 else f"{number} items"
        return f": needs {items}, got {context['actual_length']}"
    if kind == "missing":
        return ": is missing, and has no default"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        choices = _tags(key)
        if kind == "union_tag_not_found":
            return f".name: is missing; one of {', '.join(choices)}"
        near = nearest(str(context["tag"]), choices)
        hint = f"did you mean {near}? " if near else ""
        return f".name: no {key} is called {show(value['name'])}; {hint}There are {', '.join(choices)}"
    if kind == "literal_error":
        choices = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        near = nearest(value, choices) if isinstance(value, str) else None
        hint = f"; did you mean {near}?" if near else ""
        return f": expected {context['expected']}, got {show(value)}{hint}"
    return ": " + detail["msg"].replace("Input should be", "must be") + f", got {show(value)}"


def _tags(section: str) -> list[str]:
    return [tag for model in _models(Config.model_fields[section].annotation) for tag in _choices(model)]


def _sound_part(tree: Mapping[str, Any], broken: set[str], unknown: list[list[int | str]]) -> Config:
    """Return the settings without unknown keys and without what is broken."""
    drop = {tuple(location) for location in unknown}
    sound = {}
    for name, value in tree.items():
        if name in broken or (name,) in drop:
            continue
        if isinstance(value, Mapping):
            value = {key: inner for key, inner in value.items() if (name, key) not in drop}
        sound[name] = value
    return Config.model_validate(sound)
