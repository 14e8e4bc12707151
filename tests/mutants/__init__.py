"""Small changes of the code that a test has to notice; see `python -m tests.mutants --help`."""
