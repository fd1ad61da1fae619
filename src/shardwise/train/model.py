"""The model of a run: a built-in GPT by size name, or a Hugging Face folder. Built without memory for its parameters.

A folder is read by ``transformers`` (the extra "hf") for its class and shape, and never with code of its own; its
weights are safetensors, of which each rank keeps its slice. Read ``loop.py`` next.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.config.model import ModelConfig
from shardwise.errors import ConfigError
from shardwise.initial.delivery import Source
from shardwise.initial.recipe import deferred_init
from shardwise.models.sizes import MAIN_SIZES, SIZES
from shardwise.modules import Units
from shardwise.train.text import NOT_A_TARGET
from shardwise.train.tokens import optional_package

__all__ = ["Blueprint", "blueprint", "recompute_blocks"]

_HF_CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
_HF_DEFAULT_CONTEXT = 1024


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """How to build a model.

    Attributes:
        name: what the user called it.
        context: longest sequence, in tokens.
        vocab: number of distinct tokens.
        units: as for ``shard``.
        construct: makes the module with its initial values.
        weights: folder whose weights replace them; None: there is none.
        logits: calls the model, [batch, length] to [batch, length, vocab].
        save_config: writes what belongs beside the weights into a folder.
    """

    name: str
    context: int
    vocab: int
    units: Units
    construct: Callable[[], nn.Module]
    weights: Path | None
    logits: Callable[[nn.Module, Tensor], Tensor]
    save_config: Callable[[Path], None]

    def build(self, device: torch.device) -> tuple[nn.Module, Source]:
        """Return a module without memory for its parameters, and where their values come from."""
        with deferred_init() as recipe, nullcontext() if device.type == "cpu" else device:
            model = self.construct()
        return model, recipe if self.weights is None else recipe.with_weights(self.weights)

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor, *, reduction: str = "mean") -> Tensor:
        """Return the cross-entropy in nats, computed in fp32 at least.

        Args:
            model: of ``construct``, sharded or not.
            inputs: tokens, [batch, length].
            targets: the token after each, [batch, length]; ``NOT_A_TARGET`` counts nothing.
            reduction: "mean" or "sum", over targets.
        """
        logits = self.logits(model, inputs).flatten(0, 1)
        wide = logits.float() if logits.dtype.itemsize < 4 else logits
        return functional.cross_entropy(wide, targets.flatten(), ignore_index=NOT_A_TARGET, reduction=reduction)

    def meta(self) -> nn.Module:
        """Return a module on the meta device, for plans."""
        with torch.device("meta"):
            return self.construct()


def blueprint(config: ModelConfig, *, vocab: int, seed: int) -> Blueprint:
    """Return how to build the model that a configuration names.

    Args:
        config: names the model.
        vocab: number of distinct tokens of the tokenizer.
        seed: of the built-in model's values.

    Raises:
        ConfigError: no size and no folder has this name, or the folder's model does not fit.
    """
    if config.name in SIZES:
        return _by_name(config, vocab, seed)
    folder = Path(config.name).expanduser()
    if not folder.is_dir():
        sizes = ", ".join(MAIN_SIZES)
        raise ConfigError(f"model.name: {config.name!r} is no size ({sizes}) and no folder of a Hugging Face model")
    return _hugging_face(folder, config, vocab)


def _by_name(config: ModelConfig, vocab: int, seed: int) -> Blueprint:
    size, num_tokens = SIZES[config.name], config.vocab or vocab
    if num_tokens < vocab:
        raise ConfigError(f"model.vocab: {num_tokens} is too small: the tokenizer has {vocab} tokens")
    return Blueprint(
        name=config.name,
        context=config.context or size.context,
        vocab=num_tokens,
        units=size.units,
        construct=lambda: size.build(
            vocab=num_tokens,
            context=config.context,
            depth=config.depth,
            recompute=config.activation_checkpointing,
            generator=torch.Generator().manual_seed(seed),
        ),
        weights=None,
        logits=_own_logits,
        save_config=lambda folder: None,
    )


def _hugging_face(folder: Path, config: ModelConfig, vocab: int) -> Blueprint:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.name: {folder} has no config.json, so it is no Hugging Face model")
    for key in ("vocab", "depth"):
        if getattr(config, key) is not None:
            raise ConfigError(f"model.{key}: the config.json of {folder} decides this: leave it out")
    transformers = optional_package("transformers", "model.name")
    try:
        shape: Any = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # whatever it meets in a file
        raise ConfigError(f"model.name: {folder}: transformers cannot use its config.json: {error}") from None
    limit = next((int(value) for name in _HF_CONTEXT if (value := getattr(shape, name, None))), None)
    if config.context is not None and limit is not None and config.context > limit:
        raise ConfigError(f"model.context: {config.context} is longer than the {limit} tokens that {folder} can take")
    if vocab > shape.vocab_size:
        raise ConfigError(
            f"data.tokenizer: has {vocab} tokens, but the model of {folder} knows {shape.vocab_size}; "
            "name the tokenizer.json that belongs to it"
        )
    return Blueprint(
        name=config.name,
        context=config.context or limit or _HF_DEFAULT_CONTEXT,
        vocab=int(shape.vocab_size),
        units=None,
        construct=lambda: _of_config(transformers, shape, folder, recompute=config.activation_checkpointing),
        weights=folder,
        logits=_hugging_face_logits,
        save_config=lambda target: shape.save_pretrained(str(target)),
    )


def _of_config(transformers: Any, shape: Any, folder: Path, *, recompute: bool) -> nn.Module:
    try:
        model: Any = transformers.AutoModelForCausalLM.from_config(shape)
        if recompute:
            recompute_blocks(model)
    except ValueError as error:  # no causal language model has this configuration, or it cannot recompute
        raise ConfigError(f"model.name: {folder}: {error}") from None
    built: nn.Module = model
    return built


def recompute_blocks(model: Any) -> None:
    """Let a Hugging Face model keep only the inputs of its blocks for backward.

    Raises:
        ValueError: its class cannot.
    """
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):  # since transformers 5.24
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def _own_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens)
    return logits


def _hugging_face_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
