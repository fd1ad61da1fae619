"""The built-in LLaMA computes what the papers say, and recomputation changes nothing but memory."""

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.comm.base import Mesh, flat_rank
from shardwise.errors import ConfigError
from shardwise.models.gpt import GPT, Block, GPTConfig, loss
from shardwise.models.llama import Llama, LlamaBlock, LlamaConfig
from shardwise.testing.ranks import run_ranks

SHAPE = LlamaConfig(vocab=61, context=24, width=32, hidden=80, heads=4, kv_heads=2, depth=3)
TOKENS = torch.arange(48).view(2, 24) * 7 % 61


def test_a_token_sees_only_the_tokens_before_it() -> None:
    model = Llama(SHAPE).double()
    later = TOKENS.clone()
    later[:, 12:] = 5
    first, second = model(TOKENS), model(later)
    assert torch.equal(first[:, :12], second[:, :12])
    assert not torch.equal(first[:, 12:], second[:, 12:])


def test_attention_depends_on_the_distance_of_tokens_not_on_their_place() -> None:
    model = Llama(LlamaConfig(**{**vars(SHAPE), "depth": 1})).double()
    block = model.blocks[0]
    turns = model._turns(24, torch.zeros(1, dtype=torch.float64))
    x = torch.randn(1, 8, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    near, far = block(x, turns[:, :8]), block(x, turns[:, 16:])
    assert torch.allclose(near, far, rtol=0, atol=1e-7)  # angles are computed in fp32
    swapped = block(x.flip(1), turns[:, :8]).flip(1)
    assert not torch.allclose(near, swapped, rtol=0, atol=1e-3)


@pytest.mark.needs_peer("transformers")
def test_equals_the_reference_implementation() -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
    )
    reference = transformers.LlamaForCausalLM(config)
    names = {
        "embed_tokens": "token_embedding", "layers": "blocks", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "mlp_norm", "self_attn": "attention", "q_proj": "query", "k_proj": "key",
        "v_proj": "value", "o_proj": "out", "gate_proj": "gate", "up_proj": "up", "down_proj": "down",
        "lm_head": "head",
    }  # fmt: skip
    model = Llama(SHAPE)
    state = {
        ".".join(names.get(part, part) for part in key.removeprefix("model.").split(".")): value
        for key, value in reference.state_dict().items()
    }
    model.load_state_dict(state)
    assert torch.allclose(model(TOKENS), reference(TOKENS).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_recomputing_changes_no_bit(kind: str, stage: int) -> None:
    def gradients(mesh: Mesh, *, recompute: bool) -> dict[str, Tensor]:
        model = build(kind, recompute=recompute)
        shardwise.shard(model, mesh, stage=stage, units=(Block, LlamaBlock))
        tokens = TOKENS.roll(flat_rank(mesh), 0)
        loss(model(tokens), tokens.roll(-1, 1)).backward()
        return shardwise.full_gradients(model)

    plain, again = (run_ranks(2, partial(gradients, recompute=recompute))[0] for recompute in (False, True))
    assert plain.keys() == again.keys()
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert any(grad.any() for grad in plain.values())


def build(kind: str, *, recompute: bool) -> nn.Module:
    if kind == "llama":
        return Llama(LlamaConfig(**{**vars(SHAPE), "recompute": recompute}))
    return GPT(GPTConfig(vocab=61, context=24, width=32, heads=4, depth=3, recompute=recompute))


def test_recomputing_keeps_less_for_backward() -> None:
    kept = []
    for recompute in (False, True):
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        model = build("llama", recompute=recompute)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(TOKENS)
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 3


def test_initial_values_are_those_of_the_seed() -> None:
    first, second = (Llama(SHAPE, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    other = Llama(SHAPE, generator=torch.Generator().manual_seed(4))
    for name, param in first.named_parameters():
        assert torch.equal(param, second.get_parameter(name))
    assert not torch.equal(first.head.weight, other.head.weight)
    assert len([block for block in first.modules() if isinstance(block, LlamaBlock)]) == 3


def test_impossible_shapes_are_refused() -> None:
    for wrong in ({"heads": 3}, {"kv_heads": 3}, {"depth": 0}, {"width": 36}):
        with pytest.raises(ConfigError):
            LlamaConfig(**{**vars(SHAPE), **wrong})
    with pytest.raises(ConfigError, match="25 tokens"):
        Llama(SHAPE)(torch.zeros(1, 25, dtype=torch.long))
