"""Which of a checkpoint's optimizers and groups are whose here: by the names of their parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.contents import NOT_KEPT, links_of, optimizer_class
from shardwise.checkpoint.manifest import Group, Manifest
from shardwise.checkpoint.plain import from_plain
from shardwise.checkpoint.sane import Tell, check_options, check_states
from shardwise.managed import Managed
from shardwise.optim.shard import OptimizerLink

__all__ = ["match_optimizers", "origins_of"]


def origins_of(managed: Managed, manifest: Manifest, names: Mapping[str, str]) -> list[int]:
    """Return for each optimizer the number of the one in the checkpoint that shares most parameters with it.

    Each is taken once; those that share none with what is left take it in the order in which they were sharded.
    """
    links, saved = links_of(managed), manifest.values.optimizers
    here = [{names.get(managed.name_of(param)) for group in link.groups for param in group} for link in links]
    there = [{name for group in facts.groups for name in group.params} for facts in saved]
    pairs = [(-len(own & other), abs(i - j), i, j) for i, own in enumerate(here) for j, other in enumerate(there)]
    found: dict[int, int] = {}
    for _, _, i, j in sorted(pairs):
        if i not in found and j not in found.values():
            found[i] = j
    return [found[i] for i in sorted(found)]


def match_optimizers(
    managed: Managed,
    manifest: Manifest,
    names: Mapping[str, str],
    origins: Sequence[int],
    tell: Tell,
    fresh: list[str],
    dropped: list[str],
) -> list[list[dict[str, Any]]]:
    """Return for each optimizer, for each group, the options to take over.

    Args:
        managed: with the optimizers.
        manifest: of the checkpoint.
        names: parameter of the model -> its name in the checkpoint.
        origins: for each optimizer its number in the checkpoint.
        tell: is told what does not fit.
        fresh: is given the parameters of which the checkpoint has no state.
        dropped: is given those whose state has no place here.
    """
    links, saved = links_of(managed), manifest.values.optimizers
    if not links:
        return []
    if len(saved) != len(links):
        tell("optimizers", f"{len(links)} here, {len(saved)} in the checkpoint; pass optimizer_state=False")
        return []
    result = []
    for position, (link, number) in enumerate(zip(links, origins, strict=True)):
        facts = saved[number]
        if facts.class_name != optimizer_class(link):
            tell(
                "optimizers",
                f"number {position} is {optimizer_class(link)} here, {facts.class_name} in the checkpoint; pass "
                "optimizer_state=False to begin with a new one",
            )
            continue
        groups = _groups(managed, link, position, facts.groups, names, tell, fresh)
        result.append(groups)
        options = {
            names[name]: {**now, **chosen}
            for now, chosen, params in zip(link.optimizer.param_groups, groups, link.groups, strict=True)
            for name in map(managed.name_of, params)
            if name in names
        }
        check_states(link, number, facts, manifest.stored, options, tell)
        held = {slot.param.name for fragments in link.fragments() for slot in fragments.bucket.site.layout.slots}
        owned = {names.get(managed.name_of(param)) for group in link.groups for param in group}
        owned &= {names.get(name) for name in held}
        dropped += sorted({*facts.scalars, *_with_state(manifest, number)} - {name for name in owned if name})
    return result


def _groups(
    managed: Managed,
    link: OptimizerLink,
    number: int,
    saved: Sequence[Group],
    names: Mapping[str, str],
    tell: Tell,
    fresh: list[str],
) -> list[dict[str, Any]]:
    """Find the options of each group: those of the saved groups that held its parameters, if they agree."""
    origin = {name: index for index, group in enumerate(saved) for name in group.params}
    result = []
    for index, params in enumerate(link.groups):
        here = [managed.name_of(param) for param in params]
        fresh += [name for name in here if names.get(name) not in origin]
        sources = sorted({origin[names[name]] for name in here if names.get(name) in origin})
        options = [{key: from_plain(value) for key, value in saved[i].options.items()} for i in sources]
        unlike = sorted({key for other in options[1:] for key in other if not _equal(other[key], options[0].get(key))})
        if unlike:
            tell("groups", f"group {index} of optimizer {number} joins saved groups {sources} that differ in {unlike}")
        chosen = {key: value for key, value in options[0].items() if key not in NOT_KEPT} if options else {}
        if options:
            check_options(link, number, index, chosen, tell)
        result.append(chosen)
    return result


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return bool(torch.equal(first, second))
    return bool(first == second)


def _with_state(manifest: Manifest, number: int) -> set[str]:
    return {item.name for item in manifest.stored if item.kind == "optim" and item.optimizer == number}
