from litgrpo.doctor.config import Config
from litgrpo.doctor.metrics import of_rows
from litgrpo.doctor.rules_signal import truncated


def test_few_cut_completions_are_no_finding():
    rows = [{"step": n, "completion/truncated_frac": 0.1} for n in range(30)]
    assert truncated(of_rows(rows), [], Config()) is None
