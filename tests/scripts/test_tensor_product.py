from click.testing import CliRunner


def test_help_measures_nothing(script) -> None:
    product = script("tensor_product")
    result = CliRunner().invoke(product.main, ["--help"])
    assert result.exit_code == 0
    assert "Every way to spread a tiny model over ranks" in result.output
