"""The README's examples run as they stand, and its table leaves no op out."""

import re
import warnings
from pathlib import Path

import pytest

from paged_kv import ops

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_there_is_an_example_of_each_way_of_use() -> None:
    assert len(EXAMPLES) == 3
    assert all(len(example.splitlines()) <= 33 for example in EXAMPLES)


@pytest.mark.parametrize("index", range(len(EXAMPLES)), ids=["ops", "loop", "engine"])
def test_example_runs_as_it_stands(index: int, capsys: pytest.CaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers and gguf are not ours
        exec(compile(EXAMPLES[index], f"README example {index}", "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    if index == 1:
        assert printed == "8 blocks in use, waste 14.1%\n"
    if index == 2:
        assert "What is the capital of France? -> The capital of France is Paris." in printed
        assert "waste:" in printed


def test_the_table_names_every_op() -> None:
    table = README[README.index("## What works where") : README.index("**Instruction sets.**")]
    assert set(re.findall(r"`([a-z_]+)`", table.split("Block sizes")[0])) == set(ops.__all__)


def test_every_extra_is_named_where_it_is_installed() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text()
    extras = re.findall(
        r"^(\w+) = \[", project.partition("optional-dependencies]\n")[2].partition("\n\n")[0], re.M
    )
    install = README[README.index("## Install") : README.index("## The ops alone")]
    assert len(extras) > 3
    assert [extra for extra in extras if not re.search(rf"`{extra}`|\[{extra}\]", install)] == []


def test_every_linked_file_exists() -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if not link.startswith("https://")]
    assert links
    for link in links:
        assert (Path(__file__).parent.parent / link).exists(), link
