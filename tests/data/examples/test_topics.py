from litgrpo.data.examples.topics import fresh, settings, train


def test_the_lists_have_no_thing_in_common():
    lists = [[row["prompt"] for row in each()] for each in (train, settings, fresh)]
    assert [len(each) for each in lists] == [60, 20, 228]
    # The last word is the thing: "a wet coat" and "a coat" are the same one.
    trained, chosen, measured = ({topic.split()[-1] for topic in each} for each in lists)
    assert not trained & chosen
    assert not (trained | chosen) & measured
    assert all(len(set(each)) == len(each) for each in lists)
