"""Runs the pages of the documentation: what they show is what the programs print.

- A Python block that begins with `# FILE.py` is written to that file.
- Other Python blocks are run, and so is every line of a sh block, in the order of the page. A
  command must end with exit code 0, or with N where its line ends with `# exit code N`.
- The lines of the text block after them must be in their output, in this order. A line `...` stands
  for any lines, and `...` in a line for any characters.
"""

from __future__ import annotations

import re
import shlex
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple

import pytest
import shadow

PAGES = ("will-it-fit.md", "find-a-leak.md", "in-your-tests.md")
# The release with which the pages were written. Others have other line numbers and workspaces.
PYTORCH = (2, 11)


class Block(NamedTuple):
    language: str
    line: int
    text: str


def blocks_of(page: str) -> List[Block]:
    """The fenced blocks that name a language."""
    pattern = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [
        Block(found[1], page.count("\n", 0, found.start()) + 1, found[2])
        for found in pattern.finditer(page)
    ]


def missing_line(expected: str, output: str) -> str:
    """The first line of a text block that does not follow the ones before it in the output; "" if
    there is none."""
    lines = iter(output.splitlines())
    for line in expected.splitlines():
        if line.strip() == "..." or not line.strip():
            continue
        parts = [re.escape(part) for part in line.rstrip().split("...")]
        pattern = re.compile(".*".join(parts) + r"\s*")
        if not any(pattern.fullmatch(one) for one in lines):
            return line
    return ""


def run_page(page: str, folder: Path, variables: Dict[str, str]) -> str:
    """Runs a page in a folder. Returns what is wrong with it, or ""."""
    blocks = blocks_of(page)
    output = ""
    for place, block in enumerate(blocks):
        name = re.match(r"# (\w+\.py)\n", block.text)
        if block.language == "python" and name:
            (folder / name[1]).write_text(block.text, encoding="utf-8")
            continue
        if block.language == "text":
            wrong = missing_line(block.text, output)
            if wrong:
                return f"line {block.line}: the output does not have {wrong!r} there:\n{output}"
            continue
        if block.language == "python":
            (folder / "block.py").write_text(block.text, encoding="utf-8")
            commands = ["python block.py"]
        elif block.language == "sh":
            commands = block.text.splitlines()
        else:
            return f"line {block.line}: a block in {block.language} cannot be run"
        output = ""
        for command in commands:
            done = shadow.run(["bash", "-c", command], folder, variables)
            output += done.stdout
            code = re.search(r"# exit code (\d+)$", command)
            if done.returncode != (int(code[1]) if code else 0):
                return f"line {block.line}: {command}: exit code {done.returncode}:\n{output}"
        if [after.language for after in blocks[place + 1 : place + 2]] != ["text"]:
            return f"line {block.line}: there is no text block with the output"
    return "" if any(block.language == "text" for block in blocks) else "nothing is compared"


def make_programs(folder: Path) -> None:
    """`oomph`, `python` and `pytest` as an installation has them. pytest finds the plugin by its
    entry point there; here it is named."""
    python = shlex.quote(sys.executable)
    commands = {
        "oomph": shlex.quote(shadow.binary()),
        "python": python,
        "pytest": f"{python} -m pytest -p no:cacheprovider -p oomph.pytest_plugin",
    }
    folder.mkdir()
    for name, command in commands.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
        program.chmod(0o755)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dict[str, "Future[str]"]]:
    """What is wrong with each page. They run at the same time: most of it is `import torch`."""
    release = shadow.torch_release()
    if release != PYTORCH:
        shown, present = (".".join(map(str, one)) for one in (PYTORCH, release))
        pytest.skip(f"the pages show the lines and sizes of PyTorch {shown}, and this is {present}")
    variables = shadow.environment(shadow.torch_site())
    folder = tmp_path_factory.mktemp("docs")
    make_programs(folder / "bin")
    variables["PATH"] = f"{folder / 'bin'}:{variables['PATH']}"
    with ThreadPoolExecutor(len(PAGES)) as pool:
        futures = {}
        for page in PAGES:
            text = (shadow.REPOSITORY / "docs" / page).read_text(encoding="utf-8")
            (folder / page).mkdir()
            futures[page] = pool.submit(run_page, text, folder / page, variables)
        yield futures


@pytest.mark.parametrize("page", PAGES)
def test_page_shows_what_happens(page: str, results: Dict[str, "Future[str]"]) -> None:
    wrong = results[page].result()
    assert not wrong, f"docs/{page}, {wrong}"


@pytest.mark.parametrize(
    "expected, wrong",
    [
        ("a 1\nb 22 c\n", ""),
        ("...\nb ... c\n...\nend\n", ""),
        ("b 22 c\na 1\n", "a 1"),
        ("b 22\n", "b 22"),
        ("b ... d\n", "b ... d"),
        ("end\nend\n", "end"),
    ],
)
def test_lines_are_compared_whole_and_in_order(expected: str, wrong: str) -> None:
    assert missing_line(expected, "a 1\nb 22 c\nx\nend\n") == wrong
