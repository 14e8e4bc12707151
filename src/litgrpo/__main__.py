"""`python -m litgrpo COMMAND ...`, the same as `litgrpo COMMAND ...`."""

from litgrpo.cli.main import run_program

if __name__ == "__main__":
    run_program()
