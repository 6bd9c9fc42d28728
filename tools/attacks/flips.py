"""Single flipped bits in compressed files: each is refused, or changes nothing."""

import concurrent.futures
import random
import shutil
import tempfile
from pathlib import Path

from .program import CORPUS, Attack
from .samples import Samples, compressed, endings

CONTENTS = {"a.pickle": "snapshot/oom_base.pickle", "a.oomph": "native/gpt.oomph", "a.csv": "rmm/tt-metal.csv"}


class FlipAttack(Attack):
    def run(self):
        for ending in endings():
            accepted = self.flip_all(ending, [self.trace_case(name, ending) for name in CONTENTS])
            print(f".{ending}: {self.options.flips} flips, {accepted} without effect")
        if "zst" not in endings():
            stored = [self.stored_case(path) for path in sorted((CORPUS / "compressed").glob("*.zst"))]
            accepted = self.flip_all("zst", stored)
            print(f".zst, the stored seeds: {self.options.flips} flips, {accepted} without effect")
        accepted = self.flip_all("case file", [self.case_file()])
        print(f"cases/*.json.gz: {self.options.flips} flips, {accepted} without effect or with a note")

    def trace_case(self, name, ending):
        data = compressed((CORPUS / CONTENTS[name]).read_bytes(), ending)
        return f"{name}.{ending}", data, self.converted(f"{name}.{ending}", data).out

    def stored_case(self, path):
        data = path.read_bytes()
        return path.name, data, self.converted(path.name, data).out

    def converted(self, name, data):
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            (Path(folder) / name).write_bytes(data)
            return self.program.start(["convert", name, "-", "--to", "oomph"], folder)

    def flip_all(self, ending, cases):
        def one(number):
            pick = random.Random(f"{self.options.seed}/{ending}/{number}")
            name, data, *rest = pick.choice(cases)
            bit = pick.randrange(8 * len(data))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << (bit % 8)
            return self.judge(ending, name, bytes(changed), bit, *rest)

        with concurrent.futures.ThreadPoolExecutor(self.options.jobs) as pool:
            return sum(pool.map(one, range(self.options.flips)))

    def judge(self, ending, name, changed, bit, whole, page=None):
        if page is not None:
            return self.judge_page(name, changed, bit, whole, page)
        ended = self.converted(name, changed)
        path = self.work / f"flip-{bit}-{name}"
        path.write_bytes(changed)
        for kind, words in self.program.faults(ended, "data"):
            self.failures.add(f"flip-{ending}", kind, words, ended, [path])
        if ended.code == 0 and ended.out != whole:
            self.failures.add(f"flip-{ending}", "accepted", f"bit {bit} flipped: accepted with other content", ended, [path])
        path.unlink()
        return ended.code == 0

    def case_file(self):
        samples = Samples(self.program, self.work / "samples")
        case = next((samples.folder / "run" / "cases").iterdir())
        ended, page = self.page(samples.folder / "run", None, None)
        if ended.code != 0:
            raise SystemExit(f"oomph report failed: {ended.message}")
        return f"cases/{case.name}", case.read_bytes(), samples.folder / "run", page

    def page(self, run, name, data):
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            copy = Path(folder) / "run"
            shutil.copytree(run, copy)
            if name:
                (copy / name).write_bytes(data)
            ended = self.program.start(["report", "run", "--output", "page.html"], folder)
            page = Path(folder) / "page.html"
            return ended, page.read_bytes() if page.exists() else None

    def judge_page(self, name, changed, bit, run, whole):
        ended, page = self.page(run, name, changed)
        for kind, words in self.program.faults(ended):
            self.failures.add("flip-case-file", kind, words, ended)
        # A note names the file or the case.
        is_said = Path(name).name.split("-")[0].encode()[:12] in ended.err or b"case" in ended.err
        if ended.code == 0 and page != whole and not is_said:
            self.failures.add("flip-case-file", "accepted", f"bit {bit} flipped: another page without a note", ended)
        return ended.code == 0


