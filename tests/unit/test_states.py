"""The life of a kernel: the table's rules, its interpreter, and what each cause of an end means."""

from __future__ import annotations

from typing import get_args

import pytest

from lemon_kernel import telemetry
from lemon_kernel.result import FallbackReason, Reason
from lemon_kernel.session.states import (
    ATTACHABLE,
    ENDINGS,
    FALLBACKS,
    TRANSITIONS,
    Cause,
    Event,
    ImpossibleEvent,
    Life,
    Phase,
    Unavailable,
)

LEGAL = [(before, event, after) for before, row in TRANSITIONS.items() for event, after in row.items()]
IMPOSSIBLE = [(phase, event) for phase in Phase for event in Event if event not in TRANSITIONS[phase]]


def life_in(phase: Phase) -> tuple[Life, list[tuple[Phase, Phase]]]:
    changes: list[tuple[Phase, Phase]] = []
    life = Life(lambda before, after: changes.append((before, after)))
    life.phase = phase
    return life, changes


@pytest.mark.parametrize(("before", "event", "after"), LEGAL)
def test_transition(before: Phase, event: Event, after: Phase) -> None:
    """Each event of the table leads where the table says, and a change is told once, with both phases."""
    life, changes = life_in(before)

    assert life.tell(event) is after
    assert life.phase is after
    assert changes == ([] if after is before else [(before, after)])


@pytest.mark.parametrize(("phase", "event"), IMPOSSIBLE)
def test_impossible_event(phase: Phase, event: Event) -> None:
    """Whatever the table does not name is a fault of ours: it is refused and changes nothing."""
    life, changes = life_in(phase)

    with pytest.raises(ImpossibleEvent) as caught:
        life.tell(event)

    assert str(caught.value) == f"{event.value} cannot happen to a kernel that is {phase.value}"
    assert life.phase is phase
    assert changes == []


def test_a_kernel_begins_in_starting() -> None:
    """A new life is STARTING."""
    assert Life(lambda before, after: None).phase is Phase.STARTING


def test_every_phase_has_a_row() -> None:
    """The table names every phase, and every event leads somewhere from somewhere."""
    assert set(TRANSITIONS) == set(Phase)
    assert {event for _, event, _ in LEGAL} == set(Event)


def test_no_way_leads_back() -> None:
    """A kernel that is not attachable never becomes attachable again, and GONE is the end."""
    for before, _, after in LEGAL:
        assert before in ATTACHABLE or after not in ATTACHABLE

    assert not TRANSITIONS[Phase.GONE]


def test_every_life_can_end() -> None:
    """From every phase there is a way to GONE, so no kernel is kept for ever."""
    ends = {Phase.GONE}
    while more := {before for before, _, after in LEGAL if after in ends} - ends:
        ends |= more

    assert ends == set(Phase)


def test_only_what_runs_code_is_cancelled() -> None:
    """CANCELLING, the escalation, is entered from RUNNING only."""
    assert {before for before, _, after in LEGAL if after is Phase.CANCELLING} == {Phase.RUNNING}


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase in ATTACHABLE])
def test_an_attachable_kernel_can_be_stopped(phase: Phase) -> None:
    """Reset, detach, eviction and the registry's end may come in every attachable phase."""
    assert TRANSITIONS[phase][Event.STOP] not in ATTACHABLE


@pytest.mark.parametrize("cause", list(Cause))
def test_ending(cause: Cause) -> None:
    """Each cause has an event that ends a kernel, reasons of the closed list, and words the catalogue knows."""
    ending = ENDINGS[cause]

    assert any(TRANSITIONS[phase].get(ending.event, phase) not in ATTACHABLE for phase in ATTACHABLE)
    assert {ending.active, ending.late} <= set(get_args(Reason))
    words = telemetry.CATALOGUE[ending.report].metadata["reason"]
    assert isinstance(words, telemetry.Words)
    assert ending.category in words.allowed
    assert ending.outcome in get_args(telemetry.CellOutcome)
    assert ending.cancel is None or ending.cancel in get_args(telemetry.CancelCause)


def test_fallbacks_are_complete() -> None:
    """The fallback table has the five reasons of the seed, and `Unavailable` says what its reason means."""
    assert set(FALLBACKS) == set(get_args(FallbackReason))
    assert str(Unavailable("stop_failed")) == FALLBACKS["stop_failed"]
    assert Unavailable("stop_failed").reason == "stop_failed"
