from litgrpo.data.examples import topics


def test_the_sets_share_no_topic():
    generators = (topics.train, topics.validation, topics.test)
    sets = [[row["prompt"] for row in generate()] for generate in generators]
    assert [len(each) for each in sets] == [60, 20, 228]
    # The last word is the topic: "a wet coat" and "a coat" are the same.
    train, validation, test = ({topic.split()[-1] for topic in each} for each in sets)
    assert not train & validation
    assert not (train | validation) & test
    assert all(len(set(each)) == len(each) for each in sets)
