"""The script that measures the table of the page of integrations."""

import re

import pytest

from tests.integrations import conftest

measure = pytest.importorskip("measure", reason="imported from its folder")


def test_every_row_has_its_test():
    for heading, (_, test) in measure.ROWS.items():
        assert measure.program(heading)
        if test:
            file, name = test.removesuffix("[gaussians]").split("::")
            text = conftest.PAGE.parents[1].joinpath("tests", "integrations", file).read_text()
            for called in (name, measure.REAL_TEST):
                assert re.search(rf"^def {called}\(", text, re.MULTILINE)


@pytest.mark.parametrize("heading", measure.REAL)
def test_replaced_parts_are_in_the_programs(heading):
    code = measure.program(heading)
    for part in measure.REAL[heading]:
        assert part in code
    assert "digits(return" not in measure.program(heading, real=True)
