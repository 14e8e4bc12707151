import pytest

from tests.misuse.__main__ import probes, topics
from tests.misuse.probe import Probe, play

QUICK = [(t, probe) for t in topics() for probe in probes(t) if probe.quick]


@pytest.mark.parametrize("probe", [p for _, p in QUICK], ids=[f"{t}: {p.name}" for t, p in QUICK])
def test_a_misuse_ends_in_a_sentence(probe):
    seen = play(probe)
    assert not seen.faults, seen.text


def test_each_topic_has_probes_of_distinct_names():
    for topic in topics():
        names = [probe.name for probe in probes(topic)]
        assert names
        assert len(set(names)) == len(names)


def test_a_misuse_met_badly_is_found():
    silent = play(Probe("silent", script="print('fine')", says=("error",)))
    assert silent.faults == ("exit code 0, not 2", "does not say 'error'")
    broken = play(Probe("broken", script="1 / 0", code=1))
    assert broken.faults == ("prints 'Traceback (most recent call last)'",)
