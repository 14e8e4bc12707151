from litgrpo.callbacks.metric_readings import READINGS, TRL, VERL, plain
from litgrpo.callbacks.metric_table import METRICS


def test_every_number_that_is_logged_has_its_unit_in_the_order_of_the_page():
    assert list(READINGS) == list(METRICS)
    assert all(reading.unit for reading in READINGS.values())


def test_no_two_numbers_are_called_the_same_elsewhere():
    assert len(TRL) == 1 + len([each for each in READINGS.values() if plain(each.trl)])
    assert len(VERL) == 1 + len([each for each in READINGS.values() if plain(each.verl)])
