"""What a simulation trains: the model's first values, the shares of each step's batch, the loss, the optimizer.

Owns ``Work`` and ``prepare_work``, which makes it of a user's functions in the calling thread under a fixed seed: ranks
that are threads share torch's generator, so nothing may be drawn once they run. Read ``plain.py`` next.
"""

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.errors import ConfigError
from shardwise.layout import DEFAULT_ALIGN
from shardwise.modules import Units

__all__ = [
    "Loss",
    "MakeBatch",
    "MakeOptimizer",
    "Work",
    "check_loss",
    "default_loss",
    "prepare_work",
    "some_of",
]

MakeBatch = Callable[[int, int], Any]  # step and rank, from 0 on
Loss = Callable[[nn.Module, Any], Tensor]  # the model and a share; 0-dim, the mean over the share
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

SEED = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Work:
    """One case, the same for the plain run, every stage and the owners.

    Attributes:
        model: with its first values, dropout switched off; never trained itself, see ``new_model``.
        batches: by step and rank: the share of one rank in one step.
        loss: of the model on a share.
        make_optimizer: over the parameters of a model.
        units: for ``shard``.
        align: for ``shard``, in elements.
        max_norm: clip the mean gradient to this norm; None does not clip.
        notes: what was changed for the comparison, or cannot be compared.
    """

    model: nn.Module
    batches: Sequence[Sequence[Any]]
    loss: Loss
    make_optimizer: MakeOptimizer
    units: Units
    align: int
    max_norm: float | None
    notes: tuple[str, ...]

    @property
    def num_ranks(self) -> int:
        """Number of shares of a step."""
        return len(self.batches[0])

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps."""
        return len(self.batches)

    @property
    def num_params(self) -> int:
        """Number of elements of all parameters."""
        return sum(param.numel() for param in self.model.parameters())

    @property
    def keeps_bits(self) -> bool:
        """Whether stages must agree to the bit: the last bits of fused kernels depend on where a tensor is cut."""
        return self.align % DEFAULT_ALIGN == 0

    def new_model(self, dtype: torch.dtype | None = None) -> nn.Module:
        """Return a copy with the first values, its floating-point parameters in ``dtype`` if one is given."""
        model = copy.deepcopy(self.model)
        if dtype is not None:
            for param in model.parameters():
                if param.is_floating_point():
                    param.data = param.data.to(dtype)
        return model

    def share(self, step: int, rank: int, dtype: torch.dtype | None) -> Any:
        """Return a share with its floating-point tensors in ``dtype`` if one is given."""
        return self.batches[step][rank] if dtype is None else _cast(self.batches[step][rank], dtype)

    def repeated_shares(self) -> list[int]:
        """Return the steps in which two ranks get the same share."""
        digests = [[_digest(share) for share in shares] for shares in self.batches]
        return [step for step, found in enumerate(digests) if len(set(found)) < len(found)]


def prepare_work(
    make_model: Callable[[], nn.Module],
    make_batch: MakeBatch,
    *,
    num_ranks: int,
    num_steps: int,
    loss: Loss | None,
    make_optimizer: MakeOptimizer,
    units: Units,
    align: int,
    max_norm: float | None,
    notes: Sequence[str] = (),
) -> Work:
    """Call a user's functions once, in this thread, and keep what they return.

    Args:
        make_model: returns the module; it may draw from torch's generator, which is as it was afterwards.
        make_batch: returns the share of a rank in a step.
        num_ranks: number of ranks, at least 1.
        num_steps: number of optimizer steps, at least 1.
        loss: see ``Work``; None: ``default_loss``.
        make_optimizer: see ``Work``.
        units: see ``Work``.
        align: see ``Work``.
        max_norm: see ``Work``.
        notes: to begin with.

    Raises:
        ConfigError: a number is out of range, or a function returns what cannot be trained.
    """
    for name, number in (("ranks", num_ranks), ("steps", num_steps)):
        if type(number) is not int or number < 1:
            raise ConfigError(f"{name}: expected a whole number of at least 1, got {number!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = make_model()
        if not isinstance(model, nn.Module):
            raise ConfigError(f"make_model() must return a torch module, got {type(model).__name__}")
        batches = [[make_batch(step, rank) for rank in range(num_ranks)] for step in range(num_steps)]
    if not any(param.requires_grad and param.numel() for param in model.parameters()):
        raise ConfigError("make_model() returned a model without trainable parameters: there is nothing to compare")
    for name, param in model.named_parameters():
        if param.device.type != "cpu":
            raise ConfigError(f"parameter {name!r} is on {param.device}: simulated ranks share one CPU, leave it there")
    model.train()
    try:
        copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"make_model() returned a model of which no copy can be made: {error}") from error
    cuts = () if align % DEFAULT_ALIGN == 0 else (_note_on_cuts(align),)
    return Work(
        model=model,
        batches=batches,
        loss=loss or default_loss,
        make_optimizer=make_optimizer,
        units=units,
        align=align,
        max_norm=max_norm,
        notes=(*notes, *cuts, *_switch_off_dropout(model), *_notes_on_shares(model)),
    )


def check_loss(work: Work, dtype: torch.dtype | None) -> None:
    """Compute the loss of the first share, with parameters in ``dtype``.

    Raises:
        ConfigError: the loss is not a number to minimize.
    """
    with torch.random.fork_rng(devices=[]):
        loss: Any = work.loss(work.new_model(dtype), work.share(0, 0, dtype))
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point() or not loss.requires_grad:
        found = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ConfigError(f"the loss must be a 0-dim floating-point tensor with a gradient, got {found}")


def default_loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss for the usual kinds of batch, 0-dim.

    Args:
        model: gets the inputs.
        batch: a mapping of arguments to a model whose output has ``loss``; a pair of inputs and targets: cross-entropy
            over the last dimension where targets are whole numbers, else the mean square; a tensor of inputs: the mean
            square of the output.

    Raises:
        ConfigError: the batch is something else.
    """
    if isinstance(batch, Mapping):
        found: Tensor = model(**batch).loss
        return found
    if isinstance(batch, Tensor):
        return _at_least_fp32(model(batch)).square().mean()
    if isinstance(batch, Sequence) and len(batch) == 2 and isinstance(batch[1], Tensor):
        inputs, targets = batch
        output = _at_least_fp32(model(inputs))
        if targets.is_floating_point():
            return functional.mse_loss(output, _at_least_fp32(targets))
        return functional.cross_entropy(output.flatten(0, -2), targets.flatten())
    raise ConfigError(
        f"no loss is known for a batch of type {type(batch).__name__}: return a tensor, a pair of inputs and targets "
        "or a mapping, or pass loss="
    )


def _at_least_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _switch_off_dropout(model: nn.Module) -> Iterator[str]:
    """Set every dropout probability to 0: masks of unlike shares cannot agree. Yield what was changed."""
    changed = []
    for name, module in model.named_modules():
        for field, value in list(vars(module).items()):
            is_dropout = isinstance(module, nn.modules.dropout._DropoutNd) and field == "p"
            if (is_dropout or "drop" in field) and isinstance(value, float) and value > 0:
                setattr(module, field, 0.0)
                changed.append(f"{name}.{field}".lstrip("."))
    if changed:
        yield f"dropout is off, masks of unlike shares cannot agree: {some_of(changed)}"


def _notes_on_shares(model: nn.Module) -> Iterator[str]:
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        yield (
            "results depend on how the batch is shared; the plain run computes the mean of gradients over the same "
            f"shares, running averages are each rank's own and not compared: {some_of(norms)}"
        )


def _note_on_cuts(align: int) -> str:
    return f"align={align}: stages need not agree to the bit, fused kernels depend on where a tensor is cut"


def some_of(names: Sequence[str], limit: int = 5) -> str:
    """Return the first names of a list as text, and the number of others."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)  # a named tuple, or not
    return value


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _digest(share: Any) -> str:
    digest = hashlib.sha256()
    for leaf in _leaves(share):
        if isinstance(leaf, Tensor):
            digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return digest.hexdigest()
