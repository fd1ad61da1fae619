import pytest

from shardwise.environment import Environment, read_variables, set_default
from shardwise.errors import ConfigError

LAUNCHED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "NO_COLOR": "1",
}


def test_nothing_set_means_nothing_known() -> None:
    assert Environment.read({}) == Environment()
    assert Environment.read(dict.fromkeys(LAUNCHED, "")) == Environment()


def test_variables_of_a_launcher_are_read() -> None:
    assert Environment.read(LAUNCHED) == Environment(
        rank=3,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        master_addr="127.0.0.1",
        master_port=29500,
        restart_count=2,
        no_color=True,
    )


def test_environment_of_this_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert Environment.read() == Environment.read(LAUNCHED)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"RANK": "one"}, "RANK must be a whole number, at least 0, got 'one'"),
        ({"RANK": "-1"}, "RANK must be"),
        ({"RANK": "1.0"}, "RANK must be"),
        ({"RANK": " 1"}, "RANK must be"),
        ({"RANK": "1" * 5000}, "RANK must be"),
        ({"RANK": "\u0661"}, "RANK must be"),  # a digit, but none of ours
        ({"RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE must be a whole number, at least 1, got '0'"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 is larger than WORLD_SIZE=4"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT must be a whole number, at least 1, at most 65535, got '0'"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT must be"),
        ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT must be"),
        ({"RANK": ""}, "WORLD_SIZE=4 is set, RANK is not"),
        ({"WORLD_SIZE": ""}, "RANK=3 is set, WORLD_SIZE is not"),
    ],
)
def test_nonsense_is_refused_by_name(changed: dict[str, str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Environment.read(LAUNCHED | changed)


def test_named_variables_are_read_and_defaults_set_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWISE_TEST_A", "a b")
    monkeypatch.delenv("SHARDWISE_TEST_B", raising=False)
    assert read_variables(["SHARDWISE_TEST_A", "SHARDWISE_TEST_B"]) == {"SHARDWISE_TEST_A": "a b"}
    monkeypatch.setenv("SHARDWISE_TEST_B", "")
    monkeypatch.delenv("SHARDWISE_TEST_B")
    assert set_default("SHARDWISE_TEST_B", "1") == "1"
    assert set_default("SHARDWISE_TEST_B", "2") == "1"
