from litgrpo.cli.run_keys import RUN_KEYS
from tests.cli.running import cli  # noqa: F401 (a fixture)


def test_every_key_of_a_run_is_taken(cli):  # noqa: F811
    given = [
        word for key, (_, default, _) in RUN_KEYS.items() for word in (f"--{key}", str(default))
    ]
    code, out, _ = cli("fit", "-c", "recipe.yaml", *given, "--print_config")
    assert code == 0
    assert all(f"{key}:" in out for key in RUN_KEYS)
