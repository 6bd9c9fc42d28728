#!/usr/bin/env python3
"""Takes single files out of a wheel of the package index, without downloading all of it where the server allows that.

usage: wheel_files.py FOLDER PACKAGE==VERSION PATTERN...

VERSION may end in .* (the newest such version). The files that match a PATTERN are written under FOLDER. pip is asked for
the wheel's address, then the table of contents and the files are read by byte ranges. A server that refuses ranges sends
the whole wheel. pip downloads it where pip does not tell the address.
"""

import fnmatch
import glob
import io
import os
import re
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile

BLOCK = 1 << 20
PIP = [sys.executable, "-m", "pip", "--retries", "1"]
# The wheels of one Python version are enough: the allocator library does not depend on it.
WHEELS = ["--python-version", "3.11", "--only-binary=:all:"]


def version_key(version):
    return [int(part) for part in re.findall(r"\d+", version)]


def address_of(package, version):
    """The address of the newest wheel that fits, or None."""
    asked = subprocess.run(PIP + ["index", "versions", package, "-vv"] + WHEELS, capture_output=True, text=True)
    found = []
    for line in (asked.stdout + asked.stderr).splitlines():
        link = re.search(r"Found link (\S+\.whl)\S* .*version: (\S+)", line)
        if link and fnmatch.fnmatch(link.group(2), version):
            found.append((version_key(link.group(2)), link.group(1)))
    return max(found)[1] if found else None


class RangeRefused(Exception):
    """The server does not send parts of a file."""


class RemoteFile(io.RawIOBase):
    """A file on a server, read in blocks by byte ranges."""

    def __init__(self, address):
        super().__init__()
        self.address, self.place, self.blocks, self.received = address, 0, {}, 0
        self.size = self.request(0, 0)[1]

    def request(self, first, last):
        wanted = urllib.request.Request(self.address, headers={"Range": f"bytes={first}-{last}"})
        with urllib.request.urlopen(wanted, timeout=60) as answer:
            sent = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", answer.headers.get("Content-Range", ""))
            if answer.status != 206 or not sent or int(sent.group(1)) != first:
                raise RangeRefused()
            data = answer.read()
        self.received += len(data)
        return data, int(sent.group(3))

    def block(self, number):
        if number not in self.blocks:
            first = number * BLOCK
            self.blocks[number] = self.request(first, min(first + BLOCK, self.size) - 1)[0]
        return self.blocks[number]

    def readable(self):
        return True

    def seekable(self):
        return True

    def tell(self):
        return self.place

    def seek(self, offset, whence=io.SEEK_SET):
        self.place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.place, io.SEEK_END: self.size}[whence]
        return self.place

    def readinto(self, buffer):
        count = min(len(buffer), self.size - self.place, BLOCK - self.place % BLOCK)
        if count <= 0:
            return 0
        start = self.place % BLOCK
        buffer[:count] = self.block(self.place // BLOCK)[start:start + count]
        self.place += count
        return count


def take(wheel, folder, patterns):
    """Writes the matching files of an open wheel; the number of files."""
    names = [name for name in wheel.namelist() if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    for name in names:
        wheel.extract(name, folder)
    return len(names)


def by_ranges(address, folder, patterns):
    """Reads the files by ranges; what was done, or None if the server refuses ranges."""
    try:
        remote = RemoteFile(address)
        with zipfile.ZipFile(io.BufferedReader(remote, BLOCK)) as wheel:
            count = take(wheel, folder, patterns)
    except (RangeRefused, urllib.error.URLError, OSError) as error:
        print(f"byte ranges cannot be used ({type(error).__name__}); the whole wheel is taken", file=sys.stderr)
        return None
    return f"{count} files, {remote.received / 1e6:.1f} of {remote.size / 1e6:.1f} MB"


def whole(wanted, folder, patterns):
    """Downloads the whole wheel with pip."""
    with tempfile.TemporaryDirectory() as wheels:
        subprocess.run(PIP + ["download", "-q", "--no-deps", "-d", wheels] + WHEELS + [wanted], check=True)
        [path] = glob.glob(os.path.join(wheels, "*.whl"))
        with zipfile.ZipFile(path) as wheel:
            return f"{take(wheel, folder, patterns)} files, all {os.path.getsize(path) / 1e6:.1f} MB"


def main():
    if len(sys.argv) < 4 or "==" not in sys.argv[2]:
        sys.exit(__doc__)
    folder, wanted, patterns = sys.argv[1], sys.argv[2], sys.argv[3:]
    package, _, version = wanted.partition("==")
    address = address_of(package, version)
    done = by_ranges(address, folder, patterns) if address and address.startswith("http") else None
    if done is None:
        try:
            done = whole(wanted, folder, patterns)
        except subprocess.CalledProcessError:
            sys.exit(f"pip cannot download {wanted}; is there a network?")
    print(f"{wanted}: {done}")


if __name__ == "__main__":
    main()
