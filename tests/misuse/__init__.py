"""Every misuse that users met, replayed: `python -m tests.misuse`."""
