"""Everything that reads run folders: diagnosis, report, comparison, replay, and the summary.

`run.Run` reads a run; the rest is functions of runs.
"""
