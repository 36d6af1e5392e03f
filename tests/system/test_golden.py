"""Rows of small runs of every command, help texts and sentences of errors are those that were recorded (golden.py)."""

import json

import golden
import pytest

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def counts_alike():
    """True if this machine's arithmetic is that of the recording."""
    return golden.answer(golden.PROBE) == golden.recorded(golden.PROBE)


def without_numbers(line):
    """A record without the floats, whose last bits follow from the machine."""

    def masked(value):
        if isinstance(value, dict):
            return {name: masked(each) for name, each in value.items()}
        return [masked(each) for each in value] if isinstance(value, list) else None if type(value) is float else value

    return json.dumps(masked(json.loads(line)))


@pytest.mark.parametrize("name", [name for name in golden.CASES if name != golden.PROBE])
def test_answers_are_those_that_were_recorded(name, counts_alike):
    now, then = golden.answer(name), golden.recorded(name)
    if not counts_alike:
        now, then = [without_numbers(line) for line in now], [without_numbers(line) for line in then]
    different = [(before, after) for before, after in zip(then, now, strict=False) if before != after]
    assert not different, f"{len(different)} records differ, the first:\n- {different[0][0]}\n+ {different[0][1]}"
    assert len(now) == len(then)
