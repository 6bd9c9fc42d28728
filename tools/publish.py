#!/usr/bin/env python3
"""Recomputes the published tables and figures from the files under results/, and compares the texts with them.

    tools/publish.py                exit 1 if a text disagrees with its files, or a figure has no rule
    tools/publish.py --write        put what the files say into the texts
    tools/publish.py --list         every figure with its value and its source
    tools/publish.py --self-test    a changed digit in any covered place must be found
    tools/publish.py --keep strategies FOLDER..    keep what is compared of simulated runs, as simulated/strategies.csv

Rules are in publish_rules.py, in three kinds:
  tables      a table between `<!-- table: NAME -->` and `<!-- end -->` is written by a function.
  sentences   a sentence of a file with `{NAME}` where a figure stands. Each name is a function with its source files.
  allowed     numbers in the checked sections that were not measured, with the reason.
In a checked section every number must be in a table, be a figure of a sentence, or be allowed.
"""

import argparse
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import publish_rules as rules  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent
TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.S)
PLACE = re.compile(r"\{([a-z0-9_.-]+)\}")
FIGURE = r"[-+]?[0-9][0-9,.]*[0-9]|[-+]?[0-9]"
NUMBER = re.compile(r"(?<![\w.#/-])[-+]?[0-9][0-9,.]*[0-9](?![\w])|(?<![\w.#/-])[-+]?[0-9](?![\w.])(?!,\d)")


class Problem(Exception):
    """A text that disagrees: its file, its line and what is wrong."""

    def __init__(self, file, text, at, what):
        super().__init__(f"{file}:{text.count(chr(10), 0, at) + 1}: {what}")


def pattern_of(template):
    """A regular expression for a sentence; spaces match line breaks, places match figures."""
    parts = PLACE.split(template)
    out = []
    for index, part in enumerate(parts):
        if index % 2:
            out.append(f"({FIGURE})")
        else:
            out.append(r"\s+".join(re.escape(word) for word in re.split(r"\s+", part)))
    return re.compile("".join(out)), parts[1::2]


class Page:
    """A text and the spans of it that rules cover."""

    def __init__(self, file, text):
        self.file, self.text = file, text
        self.problems, self.covered, self.changes = [], [], []

    def check_tables(self):
        for match in TABLE.finditer(self.text):
            name = match.group(2)
            if name not in rules.TABLES:
                self.problems.append(Problem(self.file, self.text, match.start(), f"no rule for the table '{name}'"))
                continue
            want = "\n".join(["", *rules.TABLES[name](), "", ""])
            if match.group(3) != want:
                self.problems.append(Problem(self.file, self.text, *first_difference(match, want, name)))
                self.changes.append((match.start(3), match.end(3), want))
            self.covered.append(match.span(3))

    def check_sentences(self):
        for template in rules.SENTENCES.get(self.file, []):
            pattern, names = pattern_of(template)
            found = list(pattern.finditer(self.text))
            if len(found) != 1:
                what = f"{len(found)} places match the rule: {template}"
                self.problems.append(Problem(self.file, self.text, 0, what))
                continue
            for index, name in enumerate(names, start=1):
                says, want = found[0].group(index), rules.value(name)
                span = found[0].span(index)
                if says != want:
                    what = f"{name}: the text says {says}, the files say {want} ({rules.source(name)})"
                    self.problems.append(Problem(self.file, self.text, span[0], what))
                    self.changes.append((*span, want))
                self.covered.append(span)

    def check_coverage(self):
        """Numbers of the checked sections that no rule covers."""
        spans = list(self.covered)
        for pattern, _ in rules.ALLOWED.get(self.file, []) + rules.ALLOWED["*"]:
            spans += [match.span() for match in re.finditer(pattern, self.text)]
        for start, end in rules.sections(self.file, self.text):
            for match in NUMBER.finditer(self.text, start, end):
                if not any(low <= match.start() and match.end() <= high for low, high in spans):
                    what = f"the figure {match.group()} has no rule in tools/publish_rules.py"
                    self.problems.append(Problem(self.file, self.text, match.start(), what))

    def corrected(self):
        text = self.text
        for start, end, want in sorted(self.changes, reverse=True):
            text = text[:start] + want + text[end:]
        return text


def first_difference(match, want, name):
    """Where a table first differs, and both lines."""
    have = match.group(3)
    at, old, new = match.start(3), have.split("\n"), want.split("\n")
    for left, right in zip(old, new):
        if left != right:
            return at, f"table '{name}': the text says\n    {left}\n  and the files say\n    {right}"
        at += len(left) + 1
    return match.start(3), f"table '{name}': the text has {len(old)} lines and the files give {len(new)}"


def checked(file, text):
    page = Page(file, text)
    page.check_tables()
    page.check_sentences()
    page.check_coverage()
    return page


def pages():
    return [checked(file, (ROOT / file).read_text()) for file in rules.FILES]


def last_digits(page):
    """Where the last digit of every covered line is."""
    for start, end in page.covered:
        for line in re.finditer(r"[^\n]+", page.text[start:end]):
            digits = [start + line.start() + at for at, sign in enumerate(line.group()) if sign.isdigit()]
            yield from digits[-1:]


def self_test():
    """Changes the last digit of every figure and of every row of a table, one after the other; each must be found."""
    places, missed = 0, []
    for page in pages():
        for digit in last_digits(page):
            other = str((int(page.text[digit]) + 1) % 10)
            places += 1
            changed = Page(page.file, page.text[:digit] + other + page.text[digit + 1 :])
            changed.check_tables()
            changed.check_sentences()
            if not changed.problems:
                missed.append(f"{page.file}: a change at {digit} was not found")
    added = checked("README.md", (ROOT / "README.md").read_text().replace("\n## More", "\nIt took 4711 steps.\n\n## More"))
    if not any("4711" in str(problem) for problem in added.problems):
        missed.append("README.md: a figure without a rule was not found")
    print(f"{places} places changed, {len(missed)} not found")
    return missed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare; the default")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--keep", nargs="+", metavar=("NAME", "FOLDER"))
    options = parser.parse_args()
    if options.list:
        for name in sorted(rules.FIGURES):
            print(f"{name:32} {rules.value(name):>14}  {rules.source(name)}")
        return 0
    if options.keep:
        print("written:", rules.keep_simulated(options.keep[0], options.keep[1:]))
        return 0
    if options.self_test:
        missed = self_test()
        print(*missed, sep="\n")
        return 1 if missed else 0
    found = pages()
    if options.write:
        for page in found:
            if page.changes:
                (ROOT / page.file).write_text(page.corrected())
                print(f"written: {page.file}, {len(page.changes)} places")
        found = pages()
    problems = [problem for page in found for problem in page.problems]
    problems += rules.unused_figures() + rules.derived_pages()
    for problem in problems:
        print(problem)
    covered = sum(len(page.covered) for page in found)
    print(f"{covered} figures and tables in {len(found)} texts checked, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
