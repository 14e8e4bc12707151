import pytest

from litgrpo.rollout.engines.base import Listener


def test_a_listener_must_say_what_rows_hear():
    with pytest.raises(TypeError, match="abstract"):
        Listener()
