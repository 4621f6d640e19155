"""One table, printed and as Markdown: the same cells, whatever they hold."""

from benchmark.common.table import Table

TABLE = Table(
    "title [bold]",
    ["policy", "ratio [quartiles]"],
    [["xshare:k0=1", "1.51 [1.50, 1.73]"], ['moe-spec:{"order": [2]}', "a|b [red]"]],
    note="What [it] means.",
)


def test_printed_as_it_is_and_not_cut(capsys):
    Table("", ["a"], [["x" * 200]]).show()
    assert "x" * 200 in capsys.readouterr().out
    TABLE.show()
    printed = capsys.readouterr().out
    for text in ("title [bold]", "ratio [quartiles]", "1.51 [1.50, 1.73]", '{"order": [2]}', "a|b [red]", "[it]"):
        assert text in printed


def test_markdown_aligns_numbers_and_escapes():
    assert TABLE.to_markdown() == (
        "| policy | ratio [quartiles] |\n"
        "| --- | ---: |\n"
        "| xshare:k0=1 | 1.51 [1.50, 1.73] |\n"
        '| moe-spec:{"order": [2]} | a\\|b [red] |\n'
        "\n"
        "What [it] means."
    )
