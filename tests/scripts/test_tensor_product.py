from click.testing import CliRunner


def test_help_measures_nothing(script) -> None:
    product = script("tensor_product")
    told = CliRunner().invoke(product.main, ["--help"])
    assert told.exit_code == 0
    assert "Every way to spread a tiny model over ranks" in told.output
