#!/usr/bin/env python3
"""Measures the structure of the source tree and checks it against the limits of CONTRIBUTING.md.

    tools/structure.py              one line per measure
    tools/structure.py --details    the places behind each number
    tools/structure.py --check      exit 1 if a limit is exceeded; `--check files cycle` checks only these

Measures, over all crates of the workspace:
  lines      non-blank, non-comment lines of production code. Outside: tests/, benches/, examples/, fuzz/, items
             under #[cfg(test)], and files of modules that are declared under #[cfg(test)].
  files      files with at least one production line.
  shared     definitions (struct, enum, union, trait, type alias outside traits and impls) that share
             their name with another. Structs and enums that derive clap's Args, Parser, Subcommand or ValueEnum are left out.
  cycle      the largest set of files that import each other in a cycle, by `use` and inline paths. A file that only
             declares a module does not import it.
  function   the longest function body, in lines.
"""
import argparse
import collections
import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LIMITS = {"lines": 56_000, "files": 400, "shared_percent": 10.0, "cycle": 8, "function": 100}


TOKEN = re.compile(
    r"""//[^\n]*|(?P<block>/\*)|\b(?:b|c)?r(?P<hashes>#*)"|"(?:[^"\\]|\\.)*"|'(?:[^'\\\n]|\\(?:[^u\n]|u\{[^}]*\}|x[0-9a-fA-F]{2}))'""",
    re.S,
)


def blank_out(text):
    """The text with comments, strings and character literals replaced by spaces; line breaks stay."""
    out, at = [], 0
    while match := TOKEN.search(text, at):
        start, end = match.span()
        if match.group("block"):
            depth = 1
            while depth and (inner := re.compile(r"/\*|\*/").search(text, end)):
                depth, end = depth + (1 if inner.group() == "/*" else -1), inner.end()
        elif match.group("hashes") is not None:
            closing = '"' + match.group("hashes")
            found = text.find(closing, end)
            end = len(text) if found < 0 else found + len(closing)
        blank = re.sub(r"[^\n]", " ", text[start:end])
        if not match.group().startswith("/"):
            # A literal still makes a line of code.
            blank = "S" + blank[1:]
        out += [text[at:start], blank]
        at = end
    return "".join(out) + text[at:]


def item_end(code, at):
    """The end of the item that starts at `at`: its closing brace, or its semicolon outside of brackets."""
    depth = 0
    for j in range(at, len(code)):
        c = code[j]
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
            if c == "}" and depth == 0:
                rest = re.match(r"\s*;", code[j + 1 :])
                return j + 1 + (rest.end() if rest and code[at:].lstrip().startswith("use") else 0)
        elif c == ";" and depth == 0:
            return j + 1
        elif c == "," and depth == 0:
            return j + 1
    return len(code)


CFG_TEST = re.compile(r"#\[cfg\((?:test|all\(test\b[^\]]*|any\(test, feature = S\s*\))\)\]")


def without_tests(code):
    """Blanks items under #[cfg(test)], and returns the modules that are declared under it."""
    modules, pieces, last = [], [], 0
    for match in CFG_TEST.finditer(code):
        if match.start() < last:
            continue
        at = match.end()
        while attribute := re.match(r"\s*#\[", code[at:]):
            depth, j = 0, at + attribute.end() - 1
            while True:
                depth += {"[": 1, "]": -1}.get(code[j], 0)
                j += 1
                if depth == 0:
                    break
            at = j
        end = item_end(code, at)
        if declared := re.match(r"\s*(?:pub(?:\([^)]*\))?\s+)?mod\s+(\w+)\s*;", code[at:end]):
            modules.append(declared.group(1))
        pieces.append(code[last : match.start()])
        pieces.append("".join(c if c == "\n" else " " for c in code[match.start() : end]))
        last = end
    pieces.append(code[last:])
    return "".join(pieces), modules


class SourceFile:
    def __init__(self, path):
        self.path = path
        self.text = path.read_text()
        code = blank_out(self.text)
        # `feature = "testing"` inside cfg(any(test, ..)) became a blanked string; the pattern above accepts that.
        self.code, self.test_modules = without_tests(code)

    def lines(self):
        return [line for line in self.code.splitlines() if line.strip()]


@functools.cache
def crate_roots():
    roots = {ROOT / "src": "oomph"}
    for manifest in sorted((ROOT / "crates").glob("*/Cargo.toml")):
        name = re.search(r'^name = "([^"]+)"', manifest.read_text(), re.M).group(1)
        roots[manifest.parent / "src"] = name.replace("-", "_")
    return roots


def module_folder(path):
    return path.parent if path.name in ("mod.rs", "lib.rs", "main.rs") else path.parent / path.stem


def production_files():
    files = {}
    for root in crate_roots():
        for path in sorted(root.rglob("*.rs")):
            files[path] = SourceFile(path)
    excluded = set()
    for path, file in files.items():
        for name in file.test_modules:
            folder = module_folder(path)
            excluded.add(folder / f"{name}.rs")
            excluded |= {p for p in files if p.is_relative_to(folder / name)}
    return {p: f for p, f in files.items() if p not in excluded and f.lines()}


DEFINITION = re.compile(r"^([ \t]*)(?:pub(?:\([^)]*\))?\s+)?(?:unsafe\s+)?(struct|enum|union|trait|type)\s+([A-Z]\w*)", re.M)


def definitions(files):
    found = []
    for path, file in files.items():
        for match in DEFINITION.finditer(file.code):
            indent, kind, name = match.groups()
            if kind == "type" and indent:
                continue  # an associated type
            # Attributes stand between the end of the item before and this definition.
            start = match.start(2)
            attributes = file.code[max(file.code.rfind("}", 0, start), file.code.rfind(";", 0, start)) + 1 : start]
            if re.search(r"\b(Args|Parser|Subcommand|ValueEnum)\b", attributes):
                continue
            found.append((name, path, file.code.count("\n", 0, match.start(2)) + 1))
    return found


def expand(tree, prefix=()):
    """The paths of a use tree: `a::{b, c::d}` gives (a, b) and (a, c, d)."""
    tree = tree.strip()
    head = re.match(r"((?:\w+\s*::\s*)*)", tree).group(1)
    parts = prefix + tuple(p.strip() for p in head.split("::") if p.strip())
    rest = tree[len(head) :].strip()
    if rest.startswith("{"):
        depth, start, inside = 0, 1, rest[1 : rest.rfind("}")] + ","
        start = 0
        for j, c in enumerate(inside):
            depth += {"{": 1, "}": -1}.get(c, 0)
            if c == "," and depth == 0:
                if inside[start:j].strip():
                    yield from expand(inside[start:j], parts)
                start = j + 1
    else:
        name = re.match(r"\w+|\*", rest)
        yield parts + ((name.group(),) if name else ())


def imports(files):
    """Edges between files: for each path that code names, the file of the deepest module on it."""
    by_module, module_of = {}, {}
    for root, crate in crate_roots().items():
        for path in files:
            if path.is_relative_to(root):
                parts = path.relative_to(root).with_suffix("").parts
                if parts[-1] in ("mod", "lib", "main"):
                    parts = parts[:-1]
                by_module[(crate, *parts)] = path
        for path in (root / "lib.rs", root / "main.rs"):
            module_of[path] = (crate,)
    module_of |= {path: module for module, path in by_module.items()}
    # What a module re-exports by name belongs to the file that defines it.
    defined = collections.defaultdict(set)
    for path, file in files.items():
        pattern = r"^[ \t]*(?:pub(?:\([^)]*\))?\s+)?(?:const\s+|unsafe\s+|async\s+|extern\s+S\s*)*(?:fn|struct|enum|union|trait|type|const|static)\s+(\w+)"
        for match in re.finditer(pattern, file.code, re.M):
            defined[module_of[path]].add(match.group(1))
    reexports = collections.defaultdict(dict)
    for path, file in files.items():
        for match in re.finditer(r"\bpub(?:\([^)]*\))?\s+use\s+([^;]+);", file.code):
            for full in expand(match.group(1)):
                if full:
                    reexports[module_of[path]][full[-1]] = full

    def resolve(here, full, depth=0):
        if not full or depth > 8:
            return None
        first = full[0]
        if first == "crate":
            base, rest = (here[0],), full[1:]
        elif first == "self":
            base, rest = here, full[1:]
        elif first == "super":
            base, rest = here, full
            while rest and rest[0] == "super":
                base, rest = base[:-1], rest[1:]
        elif any(first == crate for crate in crate_roots().values()):
            base, rest = (first,), full[1:]
        elif (here + (first,)) in by_module:
            base, rest = here, full
        else:
            return None
        while rest and (base + (rest[0],)) in by_module:
            base, rest = base + (rest[0],), rest[1:]
        if rest and rest[0] not in defined.get(base, ()) and rest[0] in reexports.get(base, {}):
            target = reexports[base][rest[0]]
            found = resolve(base, target + rest[1:] if target[-1] == rest[0] else target, depth + 1)
            return found or by_module.get(base)
        return by_module.get(base)

    edges = collections.defaultdict(set)
    for path, file in files.items():
        here = module_of[path]
        uses = [m for m in re.finditer(r"\b(pub(?:\([^)]*\))?\s+)?use\s+([^;]+);", file.code)]
        for match in uses:
            own_child = match.group(1) and not match.group(2).lstrip().startswith(("crate", "super"))
            if own_child:
                continue  # a facade that re-exports its children imports nothing for itself
            for full in expand(match.group(2)):
                target = resolve(here, full)
                if target and target != path:
                    edges[path].add(target)
        for match in re.finditer(r"\b(?:crate|super|self)(?:::\w+)+", re.sub(r"\buse\s+[^;]+;", "", file.code)):
            target = resolve(here, tuple(match.group().split("::")))
            if target and target != path:
                edges[path].add(target)
    return edges


def largest_cycle(files, edges):
    index, low, stack, on_stack, components = {}, {}, [], set(), []

    def connect(root):
        work = [(root, iter(sorted(edges.get(root, ()))))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in index:
                    index[target] = low[target] = len(index)
                    stack.append(target)
                    on_stack.add(target)
                    work.append((target, iter(sorted(edges.get(target, ())))))
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    components.append(component)

    for path in files:
        if path not in index:
            connect(path)
    return sorted(components, key=len, reverse=True)


def functions(files):
    found = []
    for path, file in files.items():
        for match in re.finditer(r"\bfn\s+(\w+)", file.code):
            depth, j, code = 0, match.end(), file.code
            while j < len(code) and not (code[j] in "{;" and depth == 0):
                depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(code[j], 0)
                j += 1
            if j < len(code) and code[j] == "{":
                end = item_end(code, j)
                found.append((code.count("\n", j, end) + 1, match.group(1), path))
    return sorted(found, key=lambda entry: -entry[0])


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--details", action="store_true")
    arguments.add_argument("--check", nargs="*", choices=list(LIMITS), metavar="MEASURE")
    options = arguments.parse_args()
    files = production_files()
    sizes = {path: len(file.lines()) for path, file in files.items()}
    names = collections.defaultdict(list)
    for name, path, line in definitions(files):
        names[name].append(f"{path.relative_to(ROOT)}:{line}")
    total = sum(map(len, names.values()))
    shared = sum(len(places) for places in names.values() if len(places) > 1)
    cycles = largest_cycle(files, imports(files))
    longest = functions(files)
    measured = {
        "lines": sum(sizes.values()),
        "files": len(files),
        "shared_percent": 100 * shared / total,
        "cycle": len(cycles[0]) if cycles else 0,
        "function": longest[0][0],
    }
    print(f"production lines      {measured['lines']:>7,}  (limit {LIMITS['lines']:,})")
    print(f"production files      {measured['files']:>7}  (limit {LIMITS['files']})")
    print(f"shared type names     {measured['shared_percent']:>6.1f}%  ({shared} of {total}; limit below {LIMITS['shared_percent']:.0f}%)")
    print(f"largest import cycle  {measured['cycle']:>7}  files (limit {LIMITS['cycle']})")
    print(f"longest function      {measured['function']:>7}  lines: {longest[0][1]} (limit {LIMITS['function']})")
    if options.details:
        folders = collections.Counter()
        counts = collections.Counter()
        for path, size in sizes.items():
            parts = path.relative_to(ROOT).parts[:-1]
            for depth in range(1, len(parts) + 1):
                folders["/".join(parts[:depth])] += size
                counts["/".join(parts[:depth])] += 1
        print("\nlines  files  folder")
        for folder in sorted(folders):
            print(f"{folders[folder]:>6} {counts[folder]:>5}  {folder}")
        print("\nshared names")
        for name, places in sorted(names.items(), key=lambda entry: (-len(entry[1]), entry[0])):
            if len(places) > 1:
                print(f"{len(places):>3} {name}: {', '.join(places)}")
        print("\ncycles of more than two files")
        for component in cycles:
            if len(component) > 2:
                print(f"{len(component):>3} " + " ".join(sorted(str(path.relative_to(ROOT)) for path in component)))
        print("\nlongest functions")
        for length, name, path in longest[:10]:
            print(f"{length:>4} {name} {path.relative_to(ROOT)}")
    checked = options.check or LIMITS
    exceeded = [key for key in checked if measured[key] > LIMITS[key] - (0.001 if key == "shared_percent" else 0)]
    if options.check is not None and exceeded:
        sys.exit(f"above the limit: {', '.join(exceeded)}")


if __name__ == "__main__":
    main()
