"""How numbers are written for people."""

from vitcompress.wording import choose, figure, span


def test_whole_counts_keep_all_their_digits_and_the_rest_three() -> None:
    assert [figure(v) for v in (951836, 1234.5, 0.22824, 1.25e-6, 0)] == [
        "951,836",
        "1.23e+03",
        "0.228",
        "1.25e-06",
        "0",
    ]


def test_a_range_of_one_is_that_one() -> None:
    assert (span(2, 8), span(2, 2), span("1.20 ms", "1.20 ms")) == ("2 to 8", "2", "1.20 ms")
    assert choose("pruned_layers", 2, 8) == "choose pruned_layers from 2 to 8"
    assert choose("pruned_layers", 2, 2) == "choose pruned_layers = 2"
