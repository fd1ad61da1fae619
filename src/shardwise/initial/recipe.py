"""``deferred_init`` and the ``Recipe`` it gives: the values of a model that was built without any memory."""

import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shardwise.errors import ConfigError, StateError
from shardwise.initial.answers import Answers
from shardwise.initial.delivery import Delivery, Job, named_tensors, replace_tensors
from shardwise.initial.recorder import Recorder
from shardwise.initial.replay import Replay, strided
from shardwise.initial.states import Seen
from shardwise.initial.tape import Node, Ref, Tape
from shardwise.initial.weights import Weights, WeightSource
from shardwise.modules import NamedParam, collect_params, leave_meta
from shardwise.numerics.fingerprint import fingerprint

__all__ = ["Recipe", "RecipeWithWeights", "deferred_init"]

_INCOMPLETE = "the recipe is not complete: leave the deferred_init() context before shard()"

M = TypeVar("M", bound=nn.Module)


@contextmanager
def deferred_init() -> Iterator["Recipe"]:
    """Build a model without memory for its parameters, and remember how to compute their initial values.

    Inside the context every new tensor is a meta tensor that answers as if it were on its device. What the constructor
    does with it is recorded: factories, ``nn.init``, ``model.apply``, views, copies, ``.to(dtype)``, explicit
    generators. ``shard(model, initial_values=recipe)`` then computes one parameter after the other, and each rank keeps
    its slice. The values are, bit for bit, those of ordinary construction on the CPU from the same random state with
    the same number of threads. Where the constructor asks for a number (``.item()``, ``if tensor.any()``), it is
    computed at once.

    Random generators stand after the context where they stood before the first draw, or where the constructor seeded
    them last. ``shard`` moves them to where ordinary construction would have left them, unless they were used or seeded
    in between. The context changes generators that are shared by all threads: record one model at a time, and build it
    in the thread of the context.

    Two contexts in a row, with no ``shard`` or ``materialize`` of the first model in between, begin from the same
    random state, so equal layers get *equal values*: nothing was drawn yet. Build both models inside one context (its
    recipe serves both), or shard the first before the second context, or seed in between.

    Do everything to the model inside: what is done to its tensors between the context and ``shard`` is not recorded.
    Changes of a parameter or a buffer are noticed; those through ``.data``, and those of other tensors, are not.

    Yields:
        The recipe, complete when the context ends.

    Raises:
        ConfigError: the constructor did what cannot be recorded; the message names the operation.
        StateError: contexts are nested, or another thread records.
    """
    recorder = Recorder()
    recipe = Recipe(recorder)
    hooks = [
        nn.modules.module.register_module_parameter_registration_hook(recipe._note),
        nn.modules.module.register_module_buffer_registration_hook(recipe._note),
    ]
    try:
        with recorder, Answers(recorder):
            yield recipe
        recipe._complete(recorder.states.leave())
    except BaseException:
        with suppress(ConfigError):  # what was raised first says more
            recorder.states.leave()
        raise
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True, kw_only=True)
class _Target:
    """A tensor to compute: with what, and when in the order of the tape."""

    key: Any
    ref: Ref


class Recipe:
    """How to compute the initial values of a model; made by ``deferred_init``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._noted: dict[int, tuple[Tensor, int]] = {}  # parameters and buffers by id, with the version at the end
        self._thread = threading.get_ident()
        self._foreign: dict[tuple[int, str], weakref.ref[nn.Module]] = {}  # by id of the module and name
        self._seen: list[Seen] | None = None
        self._roots: dict[Node, Tensor] = {}

    def __repr__(self) -> str:
        """Return a summary."""
        return f"Recipe({len(self._recorder.tape.ops)} operations, {len(self._recorder.tape.num_bytes)} tensors)"

    @property
    def label(self) -> str:
        """What ranks compare."""
        return "recipe"

    def with_weights(self, source: WeightSource, *, rank0_only: bool = False) -> "RecipeWithWeights":
        """Take parameters and persistent buffers from weights, and only what they lack from the recipe.

        Args:
            source: as in ``from_weights``.
            rank0_only: as in ``from_weights``.
        """
        return RecipeWithWeights(self, Weights(source, rank0_only=rank0_only, device=None))

    def device_of(self, tensor: Tensor, name: str) -> torch.device:
        """Return the device that a tensor of the model is meant for.

        Raises:
            ConfigError: it is a meta tensor that this recipe does not know, or was changed after the context.
            StateError: the context has not ended.
        """
        if self._seen is None:
            raise StateError(_INCOMPLETE)
        if is_lazy(tensor):
            raise ConfigError(
                f"{name} of a lazy module has no shape yet: run its forward once inside the deferred_init() context, "
                "or use the module that is not lazy"
            )
        if not tensor.is_meta:
            return tensor.device
        try:
            device = self._recorder.device_of(tensor)
        except ConfigError:
            raise ConfigError(
                f"{name} is on the meta device, but this recipe did not make it: build, copy and convert the whole "
                "model inside the deferred_init() context the recipe came from"
            ) from None
        _, version = self._noted.get(id(tensor), (None, tensor._version))
        if tensor._version != version:
            kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
            raise ConfigError(
                f"{kind} {name} was changed after the deferred_init() context, which is lost: initialise it inside"
            )
        return device

    def _check(self, model: nn.Module) -> None:
        """Check that the model is what the recipe made.

        Raises:
            ConfigError: it is not, or in part.
        """
        for path, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                raise ConfigError(
                    f"{path or 'the model'} was compiled by torch.jit, which cannot be recorded: leave torch.jit out, "
                    "or build the model without deferred_init()"
                )
            for name, param in module._parameters.items():
                ref = self._foreign.get((id(module), name))
                if ref is not None and ref() is module and param is not None and not param.is_meta:
                    raise ConfigError(
                        f"parameter {path}{'.' if path else ''}{name} was made in another thread, where nothing is "
                        "recorded: build the whole model in the thread of the deferred_init() context"
                    )
        tensors = named_tensors(model)
        for name, tensor in tensors:
            self.device_of(tensor, name)
        if tensors and not any(tensor.is_meta for _, tensor in tensors):
            raise ConfigError("the recipe made nothing of this model, which has values: leave the recipe out")

    def materialize(self, model: M) -> M:
        """Give a deferred model its values without sharding it: what ordinary construction would have built.

        Raises:
            ConfigError: the model was not made by this recipe, or has its values already.
            StateError: the context has not ended.
        """
        if self._seen is None:
            raise StateError(_INCOMPLETE)
        self._check(model)
        params = collect_params(model)
        for p, value in self._deliver(model, params, frozenset()):
            if p.param.is_meta:
                leave_meta(p.param, value)
        return model

    def begin(self, job: Job) -> Delivery:
        """Check that all ranks recorded the same and begin from the same random states; deliver the parameters."""
        self._agree(job)
        return self._deliver(job.model, job.params, frozenset())

    def begin_rest(self, job: Job, given: frozenset[int]) -> Delivery:
        """Deliver what is not ``given``, by id of the tensor."""
        self._agree(job)
        return self._deliver(job.model, [], given, finish=False)

    def _agree(self, job: Job) -> None:
        problem = ""
        try:
            self._check(job.model)
        except ConfigError as error:
            problem = str(error)
        job.check(problem)
        known = [f"{p.name} holds {fingerprint(p.param):x}" for p in job.params if not p.param.is_meta]
        job.agreement.check_lines(self._recorder.tape.lines() + known, "the recorded construction")
        roots = self._recorder.states.roots()
        states = [root.state for root in roots if root.state is not None]
        if states and not job.is_alike(fingerprint(torch.stack(states)), "random states"):
            warnings.warn(
                "ranks began to construct from different random states; rank 0's are used. Seed all ranks alike",
                stacklevel=5,
            )
            shared = job.send(torch.stack(states).view(-1), "random states").cpu().view(len(states), -1)
            # Copies: torch 2.13 crashes where a state is a view that begins inside its storage.
            self._roots = {root: state.clone() for root, state in zip(roots, shared, strict=True)}

    def _deliver(
        self, model: nn.Module, params: Sequence[NamedParam], given: frozenset[int], *, finish: bool = True
    ) -> Delivery:
        wanted: list[tuple[NamedParam | int, Tensor]] = []
        ready: list[tuple[NamedParam, Tensor]] = []
        for p in params:
            if p.param.is_meta:
                wanted.append((p, p.param))
            else:
                ready.append((p, p.param.data))
        others = {id(t): t for _, t in named_tensors(model) if t.is_meta and not isinstance(t, nn.Parameter)}
        wanted += [(key, tensor) for key, tensor in others.items() if key not in given]
        return self._values(model, ready, self._computed(wanted, finish=finish), others)

    def _values(
        self,
        model: nn.Module,
        ready: list[tuple[NamedParam, Tensor]],
        computed: Iterator[tuple[Any, Tensor]],
        others: dict[int, Tensor],
    ) -> Delivery:
        found: dict[int, Tensor] = {}
        yield from ready
        for key, value in computed:
            if isinstance(key, NamedParam):
                yield key, value
            else:
                found[key] = value
            del value  # see [Note: one at a time]
        replace_tensors(model, {key: (others[key], value) for key, value in found.items()})

    def _computed(self, tensors: Sequence[tuple[Any, Tensor]], *, finish: bool) -> Iterator[tuple[Any, Tensor]]:
        """Compute tensors of the model, in the order of the recording; yield each with its key.

        Tensors that share memory are views of one tensor. Whoever gets one gives it up before asking for the next.
        ``finish``: move the generators to where ordinary construction would have left them.
        """
        tape = self._recorder.tape
        end = len(tape.ops)
        groups: dict[int, list[_Target]] = {}
        for key, tensor in tensors:
            ref = self._recorder.ref(tensor)
            assert ref is not None
            groups.setdefault(ref.storage, []).append(_Target(key=key, ref=ref))

        def compute() -> Iterator[tuple[Any, Tensor]]:
            parts = {storage: tape.slice([storage], before=end) for storage in groups}
            replay = Replay(tape, self._roots)
            replay.expect(parts.values())
            for storage in sorted(groups, key=lambda storage: _first_draw(tape, parts[storage])):
                memory = replay.compute([storage], before=end, part=parts[storage])
                for target in groups[storage]:
                    yield target.key, strided(memory[storage], target.ref)
                del memory
            if finish:
                own = Replay(tape) if self._roots else replay
                for seen in self._seen or ():
                    if seen.untouched():
                        seen.generator.set_state(own.state(seen.last))

        return compute()

    def _note(self, module: nn.Module, name: str, tensor: Tensor | None) -> None:
        """Torch's hook: a module gets a parameter or a buffer, in any thread."""
        if tensor is None:
            return
        if threading.get_ident() == self._thread:
            self._noted[id(tensor)] = (tensor, 0)
        else:
            self._foreign[id(module), name] = weakref.ref(module)

    def _complete(self, seen: list[Seen]) -> None:
        recorded = [tensor for tensor, _ in self._noted.values() if tensor.is_meta and not is_lazy(tensor)]
        if any(tensor.is_inference() for tensor in recorded):
            raise ConfigError(
                "deferred_init(): the model was built under torch.inference_mode(), whose tensors cannot be trained: "
                "use torch.no_grad()"
            )
        self._noted = {id(tensor): (tensor, tensor._version) for tensor in recorded}
        self._seen = seen


def _first_draw(tape: Tape, part: Sequence[int]) -> int:
    return next((index for index in part if tape.ops[index].draws is not None), -1)


class RecipeWithWeights:
    """Weights for what they hold, a recipe for the rest; made by ``Recipe.with_weights``."""

    def __init__(self, recipe: Recipe, weights: Weights) -> None:
        self._recipe = recipe
        self._weights = weights

    @property
    def label(self) -> str:
        """What ranks compare."""
        return f"{self._recipe.label} with {self._weights.label}"

    def device_of(self, tensor: Tensor, name: str) -> torch.device:
        """Return the device that a tensor of the model is meant for."""
        return self._recipe.device_of(tensor, name)

    def begin(self, job: Job) -> Delivery:
        """Check names and shapes, then deliver."""
        delivery = self._weights.begin(job, rest=True)
        given = frozenset(id(tensor) for name, tensor in named_tensors(job.model, persistent=True))
        return chain(delivery, self._recipe.begin_rest(job, given))
