"""What process 0 does for all; two processes are in tests/rollout/engines/test_server.py."""

from litgrpo.distributed.together import from_all, from_first, several


def test_one_process_has_its_own_value():
    assert not several()
    assert from_first({"a": 1}) == {"a": 1}
    assert from_all("one") == ["one"]
