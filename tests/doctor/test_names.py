from litgrpo.doctor.names import READINGS, TRL, VERL


def test_no_two_numbers_are_called_the_same_elsewhere():
    assert len(TRL) == 1 + len([each for each in READINGS.values() if each.trl])
    assert len(VERL) == 1 + len([each for each in READINGS.values() if each.verl])
