import pytest
import torch

from shardwise.errors import ConfigError
from shardwise.models.gpt import GPT, Block, GPTConfig, loss

SMALL = GPTConfig(vocab=11, context=8, width=12, heads=3, depth=2)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(seed: int, length: int = SMALL.context) -> torch.Tensor:
    return torch.randint(SMALL.vocab, (3, length), generator=generator(seed))


@pytest.mark.parametrize("length", [1, 5, SMALL.context])
def test_logits_have_one_row_per_token(length: int) -> None:
    logits = GPT(SMALL)(tokens(1, length))
    assert logits.shape == (3, length, SMALL.vocab)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("position", range(1, SMALL.context))
def test_future_token_does_not_change_past_logits(position: int) -> None:
    model = GPT(SMALL, generator=generator(3))
    before = tokens(1)
    after = before.clone()
    after[:, position] = (after[:, position] + 1) % SMALL.vocab
    first, second = model(before), model(after)
    assert torch.equal(first[:, :position], second[:, :position])
    assert not torch.equal(first[:, position:], second[:, position:])


def test_initial_weights_depend_on_the_generator_only() -> None:
    torch.manual_seed(1)
    first = GPT(SMALL, generator=generator(5)).state_dict()
    torch.manual_seed(2)
    second = GPT(SMALL, generator=generator(5)).state_dict()
    other = GPT(SMALL, generator=generator(6)).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_default_generator_gives_the_same_weights_every_time() -> None:
    assert torch.equal(GPT(SMALL).head.weight, GPT(SMALL).head.weight)


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    value = loss(GPT(SMALL)(tokens(1)), tokens(2))
    assert value.item() == pytest.approx(torch.tensor(float(SMALL.vocab)).log().item(), abs=0.1)


def test_residual_branches_start_smaller() -> None:
    model = GPT(GPTConfig(width=128, depth=8))
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.attention.out.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert not block.attention.qkv.bias.any()


@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_is_the_formula(tied: bool) -> None:
    config = GPTConfig(vocab=11, context=8, width=12, heads=3, depth=2, tied=tied)
    width = config.width
    block = 12 * width * width + 13 * width  # matrices; 9 biases and 4 norm vectors of the width
    heads = 1 if tied else 2
    expected = (config.vocab * heads + config.context) * width + config.depth * block + 2 * width
    assert sum(param.numel() for param in GPT(config).parameters()) == expected


def test_default_model_has_between_one_and_two_million_parameters() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert 1e6 < sum(param.numel() for param in model.parameters()) < 2e6
    assert all(param.is_meta for param in model.parameters())


def test_tied_head_is_the_embedding() -> None:
    model = GPT(GPTConfig(vocab=11, context=8, width=12, heads=3, depth=1, tied=True))
    assert model.head.weight is model.token_embedding.weight
    assert not torch.equal(model.head.weight, torch.zeros_like(model.head.weight))


def test_every_parameter_gets_a_gradient() -> None:
    model = GPT(SMALL)
    loss(model(tokens(1)), tokens(2)).backward()
    assert all(param.grad is not None and param.grad.any() for param in model.parameters())


def test_sequence_longer_than_the_context_is_refused() -> None:
    with pytest.raises(ConfigError, match="got 9 tokens, but the context is 8"):
        GPT(SMALL)(tokens(1, 9))


@pytest.mark.parametrize(("field", "value"), [("heads", 5), ("depth", 0), ("vocab", -1)])
def test_impossible_shape_is_refused(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        GPTConfig(**{field: value})  # type: ignore[arg-type]
