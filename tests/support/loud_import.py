"""A module that no checkpoint may import."""

raise AssertionError("imported")
