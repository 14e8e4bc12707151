import sqlite3
from importlib.util import find_spec

import pytest

from litgrpo.callbacks.trackio_logger import Trackio


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio is not installed")
@pytest.mark.filterwarnings("ignore")  # of the package's own threads and sockets
def test_trackio_gets_numbers_settings_and_goes_on(tmp_path, monkeypatch):
    import trackio.sqlite_storage as storage
    import trackio.utils

    for module in (storage, trackio.utils):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    for first in (0, 2):
        logger = Trackio(project="mine", name="run")
        logger.log_hyperparams({"model.group_size": 8})
        for step in (first, first + 1):
            logger.log_metrics({"val/avg@4": 0.25, "reward/mean": step / 10}, step)
        logger.finalize("success")
    logs = storage.SQLiteStorage.get_logs("mine", "run")
    assert [row["step"] for row in logs] == [0, 1, 2, 3]
    assert [row["reward/mean"] for row in logs] == [0.0, 0.1, 0.2, 0.3]
    (database,) = tmp_path.glob("*.db")
    with sqlite3.connect(database) as connection:
        ((settings,),) = connection.execute("select config from configs").fetchall()
    assert b"model.group_size" in bytes(settings)


def test_nothing_begins_before_the_first_number(monkeypatch):
    monkeypatch.setattr("litgrpo.callbacks.trackio_logger.find_spec", lambda _: True)
    logger = Trackio(name="run")
    logger.log_hyperparams({"a": 1})
    logger.finalize("success")
    assert (logger.name, logger.version, logger.settings) == ("litgrpo", "run", {"a": 1})


def test_a_missing_package_is_said(monkeypatch):
    monkeypatch.setattr("litgrpo.callbacks.trackio_logger.find_spec", lambda _: None)
    with pytest.raises(ValueError, match="pip install 'litgrpo"):
        Trackio()
