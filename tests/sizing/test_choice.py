"""Which settings fit: found by dry runs, true at the boundary, and accepted by what runs them."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import shardwise
from shardwise.comm.base import Mesh
from shardwise.errors import ConfigError
from shardwise.models.sizes import SIZES
from shardwise.sizing.case import Case, Memory, Need
from shardwise.sizing.choice import Question, ask
from shardwise.sizing.states import parse_num_params, state_rows
from shardwise.sizing.subject import SizingSubject
from shardwise.sizing.tables import choice_facts, choice_tables
from shardwise.testing.ranks import run_ranks
from shardwise.train.settings import load_settings, settings_as_toml

NANO = SizingSubject("gpt-nano", overrides=["model.context=32"])
FEW = {"stages": (1, 3), "precisions": ("fp32",), "checkpointing": (False,)}


def need(stage: int = 0, *, gpus: int = 2, micro: int = 2, depth: int | None = None, **changes: object) -> Need:
    case = Case(stage=stage, precision="fp32", checkpointing=False, gpus=gpus, micro=micro, depth=depth)
    return NANO.need(Case(**{**vars(case), **changes}))


def memory(num_bytes: int) -> Memory:
    return Memory(bytes=num_bytes, margin=0)


def test_states_are_those_of_the_ledger() -> None:
    def measured(mesh: Mesh) -> int:
        settings = NANO.settings(Case(stage=2, precision="bf16", checkpointing=False, gpus=3, micro=2))
        model = SIZES["gpt-nano"].build(vocab=256, context=32)
        engine, optimizer, _, _ = shardwise.initialize(
            model=model,
            mesh=mesh,
            config=tomllib.loads(settings_as_toml(settings)),
            units=SIZES["gpt-nano"].units,
        )
        assert optimizer is not None
        kept: list[dict[str, int]] = []
        optimizer.register_step_post_hook(lambda *_: kept.append(shardwise.measured_bytes(engine.module)))
        tokens = torch.zeros(2, 32, dtype=torch.long)
        engine.backward(engine(tokens).float().logsumexp(-1).mean())
        engine.step()
        return sum(kept[0].values())

    planned = need(2, precision="bf16", gpus=3)
    scalars = planned.states - run_ranks(3, measured)[0]  # step counters
    assert 0 < scalars < 1000


def test_a_row_that_is_too_much_names_the_kind_without_a_dry_run() -> None:
    large = SizingSubject("llama-3-405b")
    found = large.need(Case(stage=1, precision="bf16", checkpointing=False, gpus=64, micro=1), memory(80 * 2**30))
    assert found.states_alone
    assert found.largest_kind == "grad"
    assert found.peak == pytest.approx(found.num_params * (6 + 12 / 64), rel=1e-3)


def test_fewest_gpus_fit_and_one_less_does_not() -> None:
    limit = memory(need(3, gpus=6).peak)
    choice = ask(NANO, Question(memory=limit, gpus=None, micro=2, **FEW))
    by_stage = {row.need.case.stage: row for row in choice.answers}
    found = by_stage[3].found
    assert found is not None
    assert 1 < found <= 6
    assert need(3, gpus=found).peak <= limit.bytes < need(3, gpus=found - 1).peak
    assert choice.best is by_stage[3]
    assert by_stage[1].found == 0 or by_stage[1].found > found


def test_largest_micro_batch_fits_and_one_more_does_not() -> None:
    limit = memory(need(1, micro=9).peak + 1000)
    choice = ask(NANO, Question(memory=limit, gpus=2, micro=None, **FEW))
    for row in choice.answers:
        found, stage = row.found, row.need.case.stage
        assert found is not None
        assert found >= (9 if stage == 1 else 5)
        assert need(stage, micro=found).peak == row.need.peak <= limit.bytes < need(stage, micro=found + 1).peak


def test_largest_model_fits_and_one_block_more_does_not() -> None:
    limit = memory(need(3, depth=7).peak)
    choice = ask(NANO, Question(memory=limit, gpus=2, micro=2, depth=None, **FEW))
    best = choice.best
    assert best is not None
    assert best.found == 7 == best.need.case.depth
    assert need(3, depth=8).peak > limit.bytes
    assert best.need.num_params == need(3, depth=7).num_params > need(3).num_params


def test_margin_divides_fits_from_tight() -> None:
    peak = need().peak
    assert Memory(bytes=peak, margin=0).verdict(peak) == "fits"
    assert Memory(bytes=peak, margin=0.01).verdict(peak) == "tight"
    assert Memory(bytes=peak - 1, margin=0).verdict(peak) == "no"


def test_plain_data_parallel_is_taken_where_it_is_enough() -> None:
    roomy = ask(NANO, Question(memory=memory(2**30), gpus=2, micro=2))
    assert roomy.plain_is_enough
    assert roomy.best is roomy.answers[0]
    limit = memory(need(0, precision="bf16").peak - 1)
    small = ask(NANO, Question(memory=limit, gpus=2, micro=2, precisions=("bf16",)))
    assert small.best is not None
    assert small.best.need.case.stage == 1
    assert not small.plain_is_enough
    nothing = ask(NANO, Question(memory=memory(1000), gpus=2, micro=2))
    assert nothing.best is None


class WithoutRecomputation(SizingSubject):
    """A model that cannot compute its blocks again."""

    def need(self, case: Case, memory: Memory | None = None) -> Need:
        if case.checkpointing:
            raise ConfigError("no recomputation here")
        return super().need(case, memory)


def test_a_case_that_is_refused_leaves_the_other_rows() -> None:
    subject = WithoutRecomputation("gpt-nano", overrides=["model.context=32"])
    question = Question(memory=memory(2**30), gpus=2, micro=2, stages=(0, 3), precisions=("fp32",))
    choice = ask(subject, question)
    assert [row.need.case.checkpointing for row in choice.answers] == [False, False]
    assert choice.best is choice.answers[0]
    assert [(case.stage, case.checkpointing, why) for case, why in choice.refused] == [
        (0, True, "no recomputation here"),
        (3, True, "no recomputation here"),
    ]
    assert "no row for stage 3 in fp32, recompute: no recomputation here" in choice_tables(subject, choice)
    assert len(choice_facts(subject, choice)["refused"]) == 2
    with pytest.raises(ConfigError, match="no recomputation here"):
        ask(subject, replace(question, checkpointing=(True,)))


def test_recomputation_and_accumulation_are_planned() -> None:
    deep = {"depth": 6, "micro": 8}
    assert need(**deep, checkpointing=True).peak < need(**deep).peak
    several = SizingSubject("gpt-nano", overrides=["model.context=32", "batch.accumulation=2"])
    case = Case(stage=1, precision="fp32", checkpointing=False, gpus=2, micro=8, depth=6)
    assert several.need(case).peak > NANO.need(case).peak  # gradients rest while the second micro-batch runs


@pytest.mark.parametrize("name", ["gpt-nano", "gpt2", "llama-2-7b"])
def test_written_settings_give_the_planned_model(name: str, tmp_path: Path) -> None:
    subject = SizingSubject(name, context=16)
    choice = ask(subject, Question(memory=memory(2**42), gpus=2, micro=3, stages=(3,), precisions=("bf16",),
                                   checkpointing=(True,)))  # fmt: skip
    assert choice.best is not None
    settings = subject.settings(choice.best.need.case)
    path = tmp_path / "settings.toml"
    path.write_text(settings_as_toml(settings))
    again = load_settings(path, num_ranks=2)
    assert again.config == settings.config
    config = again.config
    assert (config.stage, config.precision.param, config.batch.micro, config.model.context) == (3, "bf16", 3, 16)
    assert config.model.activation_checkpointing
    assert config.model.vocab == SIZES[name].vocab


def test_fp16_is_planned_with_its_loss_scale() -> None:
    half, brain = need(2, precision="fp16"), need(2, precision="bf16")
    assert half.states == brain.states
    assert half.peak == pytest.approx(brain.peak, rel=0.01)


def test_samples_per_update_give_the_micro_batch_of_each_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('[batch]\nsize = 24\naccumulation = 3\n[model]\nname = "gpt-nano"\ncontext = 16\n')
    for gpus, micro in ((2, 4), (4, 2)):
        subject = SizingSubject(str(path), num_ranks=gpus)
        row = ask(subject, Question(memory=memory(2**30), gpus=gpus, micro="own", **FEW)).answers[0]
        assert row.need.case.micro == micro
        found = subject.settings(row.need.case)
        assert (found.batch.size, found.batch.micro, found.batch.accumulation) == (24, micro, 3)
    for open_question in ({"gpus": None, "micro": 1}, {"gpus": 2, "micro": None}):
        with pytest.raises(ConfigError, match="samples per update"):
            ask(SizingSubject(str(path), num_ranks=2), Question(memory=memory(2**30), **open_question))


def test_settings_of_a_file_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2},
                                "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}))  # fmt: skip
    subject = SizingSubject(str(path), overrides=["model.name=gpt-nano", "model.context=32", "model.vocab=50257"])
    found = subject.need(Case(stage=2, precision="fp32", checkpointing=False, gpus=2, micro=2))
    adam = SizingSubject("gpt-nano", overrides=["model.context=32", "model.vocab=50257"])
    other = adam.need(Case(stage=2, precision="fp32", checkpointing=False, gpus=2, micro=2))
    assert other.states - found.states == pytest.approx(found.num_params * 4 / 2, rel=0.01)


@pytest.mark.needs_peer("transformers")
def test_a_hugging_face_folder_without_weights_is_planned(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4
    )
    config.save_pretrained(tmp_path)
    subject = SizingSubject(str(tmp_path), context=32)
    plain, again = (
        subject.need(Case(stage=3, precision="bf16", checkpointing=again, gpus=4, micro=16)) for again in (False, True)
    )
    assert plain.num_params == sum(p.numel() for p in transformers.LlamaForCausalLM(config).parameters())
    assert again.peak < plain.peak
    with pytest.raises(ConfigError, match="cannot be chosen"):
        ask(subject, Question(memory=memory(1), gpus=1, depth=None))


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not several"):
        Question(memory=memory(1), gpus=None, micro=None)
    with pytest.raises(ConfigError, match="no built-in model"):
        SizingSubject("gpt-5")
    with pytest.raises(ConfigError, match="margin"):
        Memory(bytes=0)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"config\.json"):
        ask(SizingSubject(str(tmp_path), overrides=["model.depth=3"]), Question(memory=memory(1), gpus=1))


def test_a_number_of_parameters_has_states_only() -> None:
    assert parse_num_params("7.5B") == 7_500_000_000
    assert parse_num_params("350m") == 350_000_000
    assert parse_num_params("gpt2") is None
    rows = state_rows(7_500_000_000, 32 * 10**9, 64, stages=(0, 3), precisions=("bf16",))
    assert [row.bytes for row in rows] == [7.5e9 * 18, 7.5e9 * 18 / 64]
    fewest = state_rows(7_500_000_000, 32 * 10**9, None, stages=(0, 3), precisions=("bf16",))
    assert [row.gpus for row in fewest] == [None, 5]
    with pytest.raises(ConfigError, match="at least one"):
        state_rows(0, 1, 1, stages=(0,), precisions=("bf16",))
