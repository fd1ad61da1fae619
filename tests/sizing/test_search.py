import pytest

from shardwise.sizing.search import largest


@pytest.mark.parametrize("limit", [1, 2, 7, 40])
def test_the_largest_is_found_from_every_guess(limit: int) -> None:
    for answer in range(limit + 1):
        for guess in range(-1, limit + 3):
            assert largest(lambda n, answer=answer: n <= answer, guess=guess, limit=limit) == answer


def test_no_question_is_asked_twice_nor_beyond_the_limit() -> None:
    for answer in (0, 1, 500, 999, 1000):
        for guess in (1, 499, 1000):
            asked: list[int] = []

            def holds(number: int, answer: int = answer, asked: list[int] = asked) -> bool:
                asked.append(number)
                return number <= answer

            assert largest(holds, guess=guess, limit=1000) == answer
            assert len(set(asked)) == len(asked) <= 22
            assert all(1 <= number <= 1000 for number in asked)


def test_a_good_guess_needs_two_questions() -> None:
    asked: list[int] = []

    def holds(number: int) -> bool:
        asked.append(number)
        return number <= 77

    assert largest(holds, guess=77, limit=65_536) == 77
    assert sorted(asked) == [77, 78]
