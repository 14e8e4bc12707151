import pytest

from litgrpo.workers.sandbox.wire import dumps, loads


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 2.5, "ä\n", [1, (2, {3})], {(1, "a"): {"b": frozenset({1})}}, b"\x00", 1 + 2j],
)
def test_plain_data_keep_their_types(value):
    again = loads(dumps(value))
    assert again == value
    assert type(again) is type(value)


def test_subclasses_become_plain_types_and_objects_are_rejected():
    class Text(str):
        __slots__ = ()

    assert type(loads(dumps(Text("a")))) is str
    with pytest.raises(TypeError, match="object"):
        dumps([object()])


@pytest.mark.parametrize(
    "text", ['{"bytes": 99999999999}', '{"eval": [1]}', '{"set": [[]]}', "[", "{}"]
)
def test_texts_that_dumps_did_not_write_are_rejected(text):
    with pytest.raises(ValueError, match=r".+"):
        loads(text)
