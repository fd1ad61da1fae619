"""One hierarchy: everything raised on purpose can be caught by its base, and by the class Python users expect."""

import inspect

import pytest

import shardwise
from shardwise import errors

FAMILY = {
    "ConfigError": ValueError,
    "LayoutError": ValueError,
    "StateError": RuntimeError,
    "RankMismatchError": RuntimeError,
    "NonFiniteError": ArithmeticError,
    "CheckpointError": RuntimeError,
    "OffloadError": OSError,
}


@pytest.mark.parametrize(("name", "builtin"), FAMILY.items())
def test_error_is_caught_by_the_base_and_by_its_builtin(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)
    for kind in (errors.ShardwiseError, builtin, error):
        with pytest.raises(kind, match=r"unit layers\.3"):
            raise error("unit layers.3")


def test_hierarchy_is_complete_public_and_drawn() -> None:
    defined = {
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    }
    assert defined == {"ShardwiseError", *FAMILY} == set(errors.__all__)
    assert defined <= set(shardwise.__all__)
    drawing = errors.__doc__ or ""
    assert all(f"+- {name}({builtin.__name__})" in drawing for name, builtin in FAMILY.items())


@pytest.mark.parametrize("name", FAMILY)
def test_siblings_are_not_mistaken_for_each_other(name: str) -> None:
    error = getattr(errors, name)
    others = [getattr(errors, other) for other in FAMILY if other != name]
    assert not any(issubclass(error, other) for other in others)
