"""Formatting of numbers, ranges and names."""

from vitcompress.io.text import (
    Table,
    describe_differences,
    format_change,
    format_count,
    format_interval,
    format_number,
    format_percent,
    format_range,
    format_signed,
    format_speedup,
    shorten_names,
    shorten_paths,
    suggest_range,
)


def test_numbers_have_three_digits_or_all_before_the_point() -> None:
    assert [format_number(v) for v in (951836, 1234.6, 26.64, 0.22824, 1.25e-6, 0, -1234.6)] == [
        "951,836", "1,235", "26.6", "0.228", "1.25e-06", "0", "-1,235",
    ]  # fmt: skip


def test_a_range_with_equal_ends_is_one_value() -> None:
    assert (format_range(2, 8), format_range(2, 2), format_range("1.20 ms", "1.20 ms")) == ("2 to 8", "2", "1.20 ms")
    assert suggest_range("pruned_layers", 2, 8) == "choose pruned_layers from 2 to 8"
    assert suggest_range("pruned_layers", 2, 2) == "choose pruned_layers = 2"


def test_significant_digits() -> None:
    assert [format_number(milliseconds, 4) for milliseconds in (0.0061694, 0.8913, 26.644, 7240.476)] == [
        "0.006169", "0.8913", "26.64", "7,240",
    ]  # fmt: skip
    ratio = {"median": 183.655, "ci95": [1.5, None]}
    assert format_interval([1.5, 12.345]) == "95 % interval 1.50 to 12.3"
    assert format_speedup(ratio) == "183.7x (no interval)"
    assert format_speedup({**ratio, "ci95": [1.5, 12.345]}) == "183.7x (1.50 to 12.3)"
    slow = {"median": 0.00432, "ci95": [0.00421, 0.0999]}
    assert format_speedup(slow) == "0.0043x (0.0042 to 0.1)", "0.00 is no ratio"
    table = Table("", ("file", "speed-up"), [("a", ">1.000x"), ("b", "1.5x")])
    assert "| --- | ---: |" in table.markdown()


def test_a_small_change_is_not_shown_as_none() -> None:
    assert [format_change(10_000, after) for after in (5_000, 9_999, 10_001, 10_000)] == [
        "-50.0 %", "-0.01 %", "+0.01 %", "+0.0 %",
    ]  # fmt: skip
    assert [format_signed(points) for points in (-0.048, 0.186, -0.556, 0.0)] == ["-0.048", "+0.19", "-0.6", "+0.0"]


def test_almost_all_is_not_shown_as_all() -> None:
    """49,999 of 50,000 were 100.0 %."""
    shares = (0.0, 1 / 50_000, 0.0004, 0.5, 0.9994, 49_999 / 50_000, 1.0)
    texts = ["0.0 %", "0.002 %", "0.04 %", "50.0 %", "99.9 %", "99.998 %", "100.0 %"]
    assert list(map(format_percent, shares)) == texts
    assert [format_percent(share) for share in (1.5, -0.1, float("nan"))] == ["150.0 %", "-10.0 %", "nan %"], "damaged"


def test_numbers_of_one_row_have_one_unit() -> None:
    assert [format_count(1_420_000, like=680_550), format_count(680_550, like=1_420_000)] == ["1.42 M", "0.68 M"]
    assert [format_count(n, like=22e9) for n in (1e9, 3.4e6)] == ["1.00 G", "0.0034 G"]
    assert [format_count(n) for n in (11_230_000, 512, 0)] == ["11.23 M", "512", "0"]
    assert [format_count(n) for n in (999_996, 999_994, 999_999_999)] == ["1.00 M", "999.99 k", "1.00 G"]


def test_paths_are_shortened_to_unique_suffixes() -> None:
    assert [*shorten_paths(["a/dense.onnx", "a/model.onnx"]).values()] == ["dense.onnx", "model.onnx"]
    assert [*shorten_paths(["/r/a/model.onnx", "/r/b/model.onnx"]).values()] == ["a/model.onnx", "b/model.onnx"]
    text = "/r/a/model.onnx, batch 1: noisy (/r/a/model.onnx; /r/a; is)"
    assert shorten_names(text, ["/r/a", "/r/a/model.onnx", "is"]) == "model.onnx, batch 1: noisy (model.onnx; a; is)"
    names = ["m.onnx", "a/m.onnx", "timm:x"]
    assert shorten_paths([*names, "timm:x"]) == dict(zip(names, names, strict=True))


def test_a_table_is_built_from_records_with_format_strings_and_functions() -> None:
    table = Table.of(
        "scores", {"layer": "{site}", "top-1": lambda row: f"{row['top1']:.1f} %"}, [{"site": 3, "top1": 50}]
    )
    assert table == Table("scores", ("layer", "top-1"), (("3", "50.0 %"),))


def test_the_first_differences_of_two_tables_are_described() -> None:
    assert describe_differences({"a": {"b": [1, 2]}, "c": 3}, {"a": {"b": [1, 4]}, "c": 3}) == [
        "a.b.1 is 2 there, 4 here"
    ]
    described = describe_differences({}, dict.fromkeys("abcde", 1))
    assert described[2:] == ["c is not set there, 1 here", "2 more"]


def test_empty_tables_and_lists_differ_from_keys_that_are_not_set() -> None:
    for empty in ([], {}):
        assert describe_differences({"a": {"b": empty}}, {"a": {}}) == [f"a.b is {empty} there, not set here"]
        assert describe_differences({}, {"a": empty}) == [f"a is not set there, {empty} here"]
        assert not describe_differences({"a": empty}, {"a": empty}) + describe_differences(empty, empty)
    assert describe_differences({"a": []}, {"a": {}}) == ["a is [] there, {} here"]
    assert describe_differences({"a": ["x"]}, {"a": []}) == ["a.0 is 'x' there, not set here"]
    assert describe_differences({"a": {}}, {"a": {"b": 2}}) == ["a.b is not set there, 2 here"]
