"""Which nodes count as lost, by what is heard of them, as tables."""

import pytest

from launcher.slurm.lost_nodes import Liveness

HOSTS = ("a", "b", "c")


def play(text: str) -> tuple[Liveness, list[tuple[float, str]]]:
    """Play events `TIME WHAT [HOST]` after a first word of all at 0; returns the losses with their times.

    `look` is one look of the caller's; those in between, each second, are filled in.
    """
    liveness, found = Liveness(HOSTS, 0.0), []
    for host in HOSTS:
        liveness.note_heard(host, 0.0)
    before = 0.0
    for item in filter(None, text.split(", ")):
        moment, what, *hosts = item.split()
        now = float(moment)
        while what != "gap" and before + 1 < now:
            before += 1
            liveness.note_look(before)
        before = now
        match what:
            case "heard":
                for host in hosts:
                    liveness.note_heard(host, now)
            case "failed":
                liveness.note_failure(now)
            case "refused" | "open":
                liveness.note_look(now)
                for host in hosts:
                    liveness.note_connection(host, is_open=what == "open")
            case _:
                liveness.note_look(now)
        for host, silence in liveness.take_losses().items():
            assert silence >= 2.0
            found.append((now, host))
    return liveness, found


@pytest.mark.parametrize(
    ("events", "losses"),
    [
        ("3 refused b, 4 refused b", []),  # it speaks: its daemon alone is away
        ("7 heard a c stranger, 9 refused b, 10 refused b", [(10, "b")]),
        ("7 heard a c, 9 refused b", []),
        ("7 heard a c, 9 refused b, 10 open b, 11 refused b", []),
        ("7 heard a c, 9 refused b, 10 heard b, 11 refused b", []),
        ("7 heard a c, 9 refused b, 10 refused b, 11 refused b", [(10, "b")]),  # told once
        ("7 heard a c, 9 open b, 10 open b, 60 open b", []),  # it takes connections: no more than slow
        # After a failure two seconds without an answer are enough to look.
        ("2 failed, 2 heard a c, 3 refused b, 4 refused b", [(4, "b")]),
        ("2 failed, 2.1 heard a b c, 3 refused b, 4 refused b, 5 refused b", []),
        # The caller itself has slept, and with it perhaps all it would have heard.
        ("1 heard a b c, 30 gap, 30.5 refused b", []),
        ("1 heard a b c, 30 gap, 31 refused b, 32 refused b, 33 heard a c, 38 refused b", [(38, "b")]),
    ],
)
def test_silence_and_a_second_sign_make_a_loss(events: str, losses: list[tuple[float, str]]) -> None:
    assert play(events)[1] == losses


def test_a_task_that_has_not_said_a_word_has_more_time() -> None:
    liveness = Liveness(HOSTS, 0.0)
    for moment in range(61):
        liveness.note_look(float(moment))
        assert not liveness.list_suspects()
    liveness.note_look(61.0)
    assert liveness.list_suspects() == ["a", "b", "c"]


def test_who_is_to_be_tried() -> None:
    liveness, _ = play("3 heard a, 3 failed, 4 heard b, 12 look")
    assert liveness.list_suspects() == ["a", "c"]
    liveness, _ = play("3 failed, 3.5 heard b, 5 look")
    assert liveness.list_suspects() == ["a", "c"]


def test_all_have_been_heard_of() -> None:
    liveness, _ = play("2 heard a b, 9 refused c, 10 refused c")
    assert liveness.has_heard_all(HOSTS, 1.0) and not liveness.has_heard_all(HOSTS, 2.0)
