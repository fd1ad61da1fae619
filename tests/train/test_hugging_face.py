"""A folder of a Hugging Face model: its weights are the start, the folder of the run is one that they read again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from shardwise.config.model import ModelConfig
from shardwise.errors import ConfigError
from shardwise.testing.ranks import run_ranks
from shardwise.train.loop import RunTask, prepare, run_rank
from shardwise.train.measure import parameter_digest
from shardwise.train.model import blueprint
from shardwise.train.report import Evaluated, Finished
from shardwise.train.settings import load_settings

needs_hf = pytest.mark.needs_peer("transformers")


def make_folder(folder: Path, kind: str) -> Path:
    import transformers

    shapes: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(
            vocab_size=256,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            bos_token_id=1,
            eos_token_id=0,
        ),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=256, n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=0
        ),
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        transformers.AutoModelForCausalLM.from_config(shapes[kind]()).save_pretrained(folder)
    return folder


def task_of(model: Path, folder: Path, text: Path) -> RunTask:
    text.write_text("".join(f"line {number}\n" for number in range(300)))
    config = {
        "model": {"name": str(model)},
        "data": {"path": [str(text)]},
        "train": {"steps": 2, "eval_batches": 2, "sample_tokens": 3, "output": str(folder)},
    }
    return RunTask(settings=load_settings(config, num_ranks=1))


@needs_hf
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_training_starts_from_the_weights_of_the_folder_and_writes_one(kind: str, tmp_path: Path) -> None:
    import transformers

    task = task_of(make_folder(tmp_path / "model", kind), tmp_path / "run", tmp_path / "text.txt")
    told: list[Any] = []
    (finished,) = run_ranks(1, lambda mesh: run_rank(task, mesh, told.append))
    assert isinstance(finished, Finished)
    original = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    held_out = prepare(task.settings).text.held_out
    assert held_out is not None
    pairs = [held_out.spread(number=number, count=2, size=1) for number in range(2)]
    with torch.no_grad():
        losses = [functional.cross_entropy(original(x).logits.flatten(0, 1), y.flatten()) for x, y in pairs]
    before = next(message for message in told if isinstance(message, Evaluated))
    assert before.held_out_loss == pytest.approx(float(sum(losses)) / 2, rel=1e-5)
    trained = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run")
    names = {name for name, _ in trained.named_parameters()}
    assert parameter_digest(dict(trained.named_parameters())) == finished.digest
    unchanged = parameter_digest({name: param for name, param in original.named_parameters() if name in names})
    assert finished.digest != unchanged


@needs_hf
def test_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "gpt2")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: has 300 tokens, but the model of .* knows 256"):
        blueprint(ModelConfig(name=str(folder)), vocab=300, seed=0)
    with pytest.raises(ConfigError, match=r"model\.context: 64 is longer than the 32 tokens"):
        blueprint(ModelConfig(name=str(folder), context=64), vocab=256, seed=0)
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ConfigError, match=r"transformers cannot use its config\.json"):
        blueprint(ModelConfig(name=str(folder)), vocab=256, seed=0)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json, so it is no Hugging Face model"):
        blueprint(ModelConfig(name=str(tmp_path)), vocab=256, seed=0)


def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(ConfigError, match=r"model\.name: needs the package transformers.*the extra hf"):
        blueprint(ModelConfig(name=str(tmp_path)), vocab=256, seed=0)
