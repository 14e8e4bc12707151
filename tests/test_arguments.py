import operator

import pytest

from litgrpo.arguments import above, at_least, at_most, did_you_mean, one_of


@pytest.mark.parametrize("bound", [-1, 0, 0.5, 7])
@pytest.mark.parametrize(
    ("check", "holds"),
    [(at_least, operator.ge), (at_most, operator.le), (above, operator.gt)],
)
def test_a_number_passes_exactly_if_it_is_within_its_bound(check, holds, bound):
    for value in (bound - 1, bound - 1e-9, bound, bound + 1e-9, bound + 1):
        if holds(value, bound):
            check("a", value, bound)
        else:
            with pytest.raises(ValueError, match="a is"):
                check("a", value, bound)
    check("a", None, bound)  # an option that is not set


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: at_least("rows", 0, 1), "rows is 0; it must be at least 1."),
        (lambda: at_most("share", 2, 1), "share is 2; it must be at most 1."),
        (lambda: above("rate", 0.0, 0), "rate is 0.0; it must be above 0."),
        (lambda: above("rate", float("nan"), 0), "rate is nan; it must be above 0."),
        (lambda: one_of("mode", "x", ["a", "b"]), "mode is 'x'; it must be one of: a, b."),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(check, message):
    with pytest.raises(ValueError, match=message):
        check()


def test_the_nearest_word_is_named():
    assert did_you_mean("grop", ["grpo", "sft"]) == " (did you mean 'grpo'?)"
    assert did_you_mean("xyz", ["grpo"]) == ""


def test_an_import_path_names_what_it_says():
    from litgrpo.arguments import import_by_path

    assert import_by_path("litgrpo.arguments.import_by_path") is import_by_path


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("name", "'name' is not an import path such as"),
        (".math.floor", "is not an import path"),
        ("a b.c", "is not an import path"),
        ("no_such_module.name", "cannot import module 'no_such_module' of 'no_such_module.name'"),
        ("math.flor", "module 'math' has no 'flor'"),
    ],
)
def test_an_import_path_that_leads_nowhere_is_refused_with_the_reason(path, message):
    from litgrpo.arguments import import_by_path

    with pytest.raises(ValueError, match=message):
        import_by_path(path)
