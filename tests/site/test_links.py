"""A link that leads nowhere is found, and a file that would be loaded from elsewhere."""

from tests.site.links import faults


def test_links_names_and_loaded_files(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "other.html").write_text(
        '<h1 id="here">x</h1><img src="data:image/png;base64,">'
    )
    (tmp_path / "index.html").write_text(
        '<a href="a/other.html#here">good</a><a href="https://example.org">good</a>'
        '<a href="#nowhere">1</a><a href="a/other.html#not">2</a><a href="b.html">3</a>'
        '<script src="https://example.org/x.js"></script>'
    )
    assert list(faults(tmp_path)) == [
        "index.html: #nowhere",
        "index.html: a/other.html#not",
        "index.html: b.html",
        "index.html: loads https://example.org/x.js",
    ]
