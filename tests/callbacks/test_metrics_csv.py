import pytest
from lightning.pytorch.loggers import CSVLogger

from litgrpo.callbacks.metrics_csv import MetricsCSV


def test_a_new_name_adds_a_column_and_a_new_logger_goes_on_in_the_same_file(tmp_path):
    first = MetricsCSV(tmp_path)
    first.log_metrics({"b": 1.0, "a": 2.0}, step=1)
    first.log_metrics({"a": 3.0}, step=2)
    resumed = MetricsCSV(tmp_path)
    resumed.log_metrics({"a": 4.0, "c": 5.0}, step=3)
    written = (tmp_path / "metrics.csv").read_text().splitlines()
    assert written == ["step,a,b,c", "1,2.0,1.0,", "2,3.0,,", "3,4.0,,5.0"]


@pytest.mark.filterwarnings("ignore:Experiment logs directory")
def test_lightnings_own_logger_still_deletes_what_it_resumes(tmp_path):
    # If this fails, MetricsCSV can go.
    for step in (1, 2):
        logger = CSVLogger(tmp_path, name="", version="")
        logger.log_metrics({"a": 1.0}, step=step)
        logger.save()
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["a,step", "1.0,2"]
