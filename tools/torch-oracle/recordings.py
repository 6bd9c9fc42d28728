#!/usr/bin/env python3
"""Writes recordings of random programs, made by the real allocator of a release, in the snapshot format of that release.

usage: recordings.py ORACLE OUT [--kinds KIND,...] [--count N] [--first N]

ORACLE is the program that build.sh made. OUT/KIND/N.pickle is what torch.cuda.memory._snapshot() of that release would
have returned, OUT/KIND/N.json what a snapshot does not contain. README.md describes both.
"""

import argparse
import json
import os
import pickle
import re
import subprocess

from random_program import Program


def release_of(oracle):
    """The minor number of 2.N."""
    with open(os.path.join(os.path.dirname(oracle), "torch", "version.py")) as version:
        return int(re.search(r"__version__ = '2\.(\d+)", version.read()).group(1))


class Answer:
    """What the oracle printed for one program, as a snapshot of its release."""

    def __init__(self, lines, minor):
        self.minor = minor
        self.trace, self.segments, self.settings = [], [], {}
        self.truth, self.statistics, self.created, self.refused = [], {}, [], []
        details, sizes, histories = [], [], []
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "truth":
                self.truth.append(rest.split())
            elif word == "stat":
                name, value = rest.split()
                self.statistics[name] = int(value)
            elif word == "segment":
                self.segments.append(self.segment(rest.split()))
            elif word == "entry":
                details.append(rest.split(" "))
            elif word == "sizes":
                sizes.append(rest.split())
            elif word == "history":
                histories.append([{"addr": int(addr), "real_size": int(size)}
                                  for addr, size in (past.split(":") for past in rest.split())])
            elif word == "setting":
                name, _, value = rest.partition(" ")
                self.settings[name] = value
            elif word == "created":
                kind, address = rest.split()
                self.created.append([kind, int(address)])
            elif word == "refused":
                self.refused.append(int(rest))
            elif word not in ("#", ""):
                self.trace.append(self.entry(word, rest.split()))
        for entry, detail in zip(self.trace, details):
            self.complete_entry(entry, detail)
        for segment, size in zip(self.segments, sizes):
            self.complete_segment(segment, size)
        blocks = [block for segment in self.segments for block in segment["blocks"]]
        for block, history in zip(blocks, histories):
            if history:
                block["history"] = history

    @staticmethod
    def entry(action, words):
        address = "device_free" if action == "oom" else "addr"
        return {"action": action, address: int(words[0]), "size": int(words[1]), "stream": int(words[2])}

    def complete_entry(self, entry, detail):
        known = dict(zip(detail[::2], detail[1::2]))
        if self.minor >= 2:
            entry["time_us"] = int(known["time_us"])
        if self.minor >= 8:
            entry["compile_context"] = known["compile_context"]
        if self.minor >= 10:
            entry["user_metadata"] = ""
        if self.minor >= 12:
            entry["pool_id"] = pool_of(known["pool_id"])

    def segment(self, words):
        address, total, stream, kind, mapped = words[:5]
        segment = {
            "device": 0, "address": int(address), "total_size": int(total), "allocated_size": 0, "active_size": 0,
            "requested_size": 0, "stream": int(stream), "segment_type": kind,
        }
        if self.minor >= 1:
            segment.update(segment_pool_id=(0, 0), is_expandable=mapped == "mapped", frames=[])
        states = {"allocated": "active_allocated", "pending": "active_pending_free", "free": "inactive"}
        segment["blocks"] = []
        for word in words[7:]:
            place, size, state, requested = word.split(":")
            block = {"address": int(place)} if self.minor >= 1 else {}
            block.update(size=int(size), requested_size=int(requested), state=states[state])
            if self.minor >= 1:
                block["frames"] = []
            segment["blocks"].append(block)
        return segment

    def complete_segment(self, segment, size):
        _, segment["allocated_size"], segment["active_size"], segment["requested_size"] = map(int, size[:4])
        if self.minor >= 1:
            segment["segment_pool_id"] = pool_of(size[4])

    def snapshot(self, ring):
        """The value of torch.cuda.memory._snapshot(), with at most `ring` entries."""
        trace = self.trace[-ring:] if ring else self.trace
        snapshot = {"segments": self.segments, "device_traces": [trace]}
        if self.minor >= 3:
            flags = ("expandable_segments", "release_lock_on_cudamalloc", "pinned_use_cuda_host_register",
                     "graph_capture_record_stream_reuse")
            settings = {}
            for name, value in self.settings.items():
                if name == "PYTORCH_CUDA_ALLOC_CONF":
                    settings[name] = value
                elif name == "garbage_collection_threshold":
                    settings[name] = float(value)
                elif name == "roundup_power2_divisions":
                    settings[name] = {str(1 << place): int(one) for place, one in enumerate(value.split())}
                else:
                    settings[name] = bool(int(value)) if name in flags else int(value)
            snapshot["allocator_settings"] = settings
        if self.minor >= 5:
            snapshot["external_annotations"] = []
        if self.minor >= 14:
            snapshot.update(host_segments=[], host_traces=[])
        return snapshot


def pool_of(text):
    first, second = text.split(".")
    return (int(first), int(second))


def truth_of(program, lines, answer, ring):
    """What the snapshot does not say."""
    dropped = max(0, len(answer.trace) - ring) if ring else 0
    truth = answer.truth[dropped:]
    ids = sorted({pool_of(one) for _, *pools in truth for one in pools})
    names = {pool: place for place, pool in enumerate(ids)}
    # Entries before each empty_cache of the recorded part: those of all calls before its line.
    emptied, changes = [], []
    calls = [int(one[0]) for one in truth]
    begin = calls[0] if dropped else lines.index("history") if "history" in lines else 0
    for number, line in enumerate(lines):
        if number >= begin and (line == "e" or line.startswith("e ")):
            before = sum(1 for call in calls if call < number)
            emptied.append({"before_entry": before, "pool": line[2:] or None})
        elif number >= begin and line.startswith("conf "):
            changes.append({"before_entry": sum(1 for call in calls if call < number), "settings": line[5:]})
    recorded = "middle" if program.middle else "ring" if dropped else "whole"
    return {
        "release": f"2.{answer.minor}",
        "settings": program.settings,
        "fraction": program.fraction,
        "device_total": program.total,
        "device_capacity": program.capacity,
        "addresses": "down" if program.down else "up",
        "addresses_reused": program.reuse,
        "recorded": recorded,
        "entries_dropped": dropped,
        "peak_allocated": answer.statistics["allocated_bytes.all.peak"],
        "peak_reserved": answer.statistics["reserved_bytes.all.peak"],
        "retries": answer.statistics["num_alloc_retries"],
        "ooms": answer.statistics["num_ooms"],
        "statistics": answer.statistics,
        "pool_ids": ids,
        "pool_of_entry": [names[pool_of(one[1])] for one in truth],
        "pool_of_request": [names[pool_of(one[2])] for one in truth],
        "empty_cache": emptied,
        "settings_changes": changes,
        "created": answer.created,
        "refused": answer.refused,
        "program": lines,
    }


def run(oracle, programs):
    """The lines that the oracle prints for each program; None where it crashed."""
    text = "".join("\n".join(lines) + "\nrun\n" for lines in programs)
    out = subprocess.run([oracle, "full"], input=text, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    answers, lines = [], []
    for line in out.stdout.splitlines():
        if line.startswith("end "):
            answers.append(lines if line == "end 0" else None)
            lines = []
        else:
            lines.append(line)
    return answers


def write(folder, name, program, lines, answer):
    # A recording that begins in the middle of nothing or has no entries is of no use.
    if not answer.trace:
        return False
    with open(os.path.join(folder, f"{name}.pickle"), "wb") as out:
        pickle.dump(answer.snapshot(program.ring), out, protocol=4)
    with open(os.path.join(folder, f"{name}.json"), "w") as out:
        json.dump(truth_of(program, lines, answer, program.ring), out)
    return True


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("oracle")
    arguments.add_argument("out")
    arguments.add_argument("--kinds", metavar="KIND,...", default="asc,desc,pools_asc,pools_desc")
    arguments.add_argument("--count", type=int, default=100)
    arguments.add_argument("--first", type=int, default=0)
    options = arguments.parse_args()
    minor = release_of(options.oracle)
    for kind in options.kinds.split(","):
        folder = os.path.join(options.out, kind)
        os.makedirs(folder, exist_ok=True)
        written, crashed, refused = 0, 0, 0
        number = options.first
        while written < options.count:
            batch = [Program(minor, kind, place) for place in range(number, number + 25)]
            texts = [program.text() for program in batch]
            for program, lines, printed in zip(batch, texts, run(options.oracle, texts)):
                if printed is None:
                    crashed += 1
                    continue
                answer = Answer(printed, minor)
                if written < options.count and write(folder, program.number, program, lines, answer):
                    written += 1
                    refused += bool(answer.refused)
            number += 25
        print(f"2.{minor} {kind}: {written} recordings; {crashed} programs crashed, {refused} had a refused call", flush=True)


if __name__ == "__main__":
    main()
