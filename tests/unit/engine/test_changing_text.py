"""ChangingText: a token that changes in every prompt is noticed, and a conversation that grows is not."""

from __future__ import annotations

from specinfer.engine.changing_text import ChangingText

FIXED = [*range(100, 300)]


def test_a_short_text_that_changes_three_times_in_a_row_is_noticed_once() -> None:
    for name, prompts, expected in (
        ("a date", [[7, number, *FIXED] for number in range(6)], [3]),
        ("a date of other lengths", [[7, *[9] * number, *FIXED] for number in range(6)], [3]),
        ("the same", [[7, *FIXED]] * 6, []),
        ("another text", [[number] * 200 for number in range(6)], []),
        ("too short a rest", [[7, number, *FIXED[:60]] for number in range(6)], []),
        ("interrupted", [[1, *FIXED], [2, *FIXED], [3, *FIXED], [5] * 99, [4, *FIXED], [6, *FIXED]], []),
    ):
        watch = ChangingText()
        assert [i for i, prompt in enumerate(prompts) if watch.see(b"", prompt)] == expected, name


def test_a_bounded_number_of_beginnings_is_watched() -> None:
    watch = ChangingText()
    for number in range(10_000):
        watch.see(b"%d" % number, FIXED)
    assert len(watch._seen) == 64
