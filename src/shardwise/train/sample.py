"""Lets a language model write."""

from collections.abc import Callable

import torch
from torch import Tensor

from shardwise.train.tokens import Tokenizer

__all__ = ["sample_text"]


@torch.no_grad()
def sample_text(
    logits_of: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
    *,
    prompt: str,
    num_tokens: int,
    context: int,
    temperature: float,
    seed: int,
    device: torch.device,
) -> str:
    """Continue a prompt, token by token, until the text ends or ``num_tokens`` are written.

    Every rank calls it with the same arguments and draws the same tokens.

    Args:
        logits_of: from tokens [1, length] to logits [1, length, vocab].
        tokenizer: makes tokens of the prompt, and text of tokens.
        prompt: start of the text.
        num_tokens: most tokens to write.
        context: longest sequence that ``logits_of`` takes.
        temperature: divisor of the logits; 0 takes the likeliest token.
        seed: of the draws.
        device: of the tokens.

    Returns:
        The prompt and what follows.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = tokenizer.encode(prompt.encode(), "the prompt").tolist()
    start = tokens or [tokenizer.end or 0]
    written: list[int] = []
    for _ in range(num_tokens):
        window = torch.tensor([(start + written)[-context:]], device=device)
        last = logits_of(window)[0, -1, : tokenizer.vocab].float().cpu()
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(last / temperature, dim=0), 1, generator=generator))
        else:
            token = int(last.argmax())
        if token == tokenizer.end:
            break
        written.append(token)
    return tokenizer.decode(tokens + written)
