"""Changes of files: of bytes, of lines, and of the objects that a pickle or JSON file describes."""

import json
import pickle
import re

NUMBERS = [
    "0", "-1", "1", "7", "255", "4096", "65535", "2147483647", "2147483648", "4294967295", "4294967296", "1099511627776",
    "9223372036854775807", "9223372036854775808", "18446744073709551615", "18446744073709551616",
    "340282366920938463463374607431768211456", "-9223372036854775808", "0.5", "-0.0", "1e308", "1e-320", "inf", "nan",
    "0x7fffffffffffffff", "00000000000000000000000000000001", "1_000", "٣",
]
TEXTS = [
    "", " ", "\n", "\x00", "\x1b[2K\x1b[3A", "\r", "\x7f", "\u202e", "\u2028", "\ufeff", "\u009b31m", "<script>", "'\"`$(x)",
    "../../etc/passwd", "/dev/zero", "%s%n", "a" * 5000, ",", ";", ":", "[", "]", "{", "}", "\\", "=", "#", "|",
]
BYTES = [b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x80", b"\r\n", b"\n"]


def flip(random, data, _others):
    data = bytearray(data)
    for _ in range(random.choice([1, 1, 1, 2, 4, 16])):
        position = random.randrange(len(data))
        data[position] ^= 1 << random.randrange(8)
    return bytes(data)


def put(random, data, _others):
    position = random.randrange(len(data) + 1)
    what = random.choice(BYTES + [text.encode() for text in TEXTS])
    skip = random.choice([0, len(what), 1])
    return data[:position] + what + data[position + skip :]


def remove(random, data, _others):
    start = random.randrange(len(data))
    return data[:start] + data[start + random.choice([1, 2, 4, 8, 64, 1024]) :]


def repeat(random, data, _others):
    start = random.randrange(len(data))
    piece = data[start : start + random.choice([1, 8, 64, 512])]
    return data[:start] + piece * random.choice([2, 3, 10, 200]) + data[start:]


def cut(random, data, _others):
    return data[: random.randrange(len(data))]


def extend(random, data, others):
    return data + random.choice([b"\x00", b"x", b"\n", bytes(random.choices(range(256), k=9)), random.choice(others), data])


def splice(random, data, others):
    other = random.choice(others)
    return data[: random.randrange(len(data))] + other[random.randrange(len(other)) :]


def number(random, data, _others):
    places = list(re.finditer(rb"-?\d+(\.\d+)?", data))
    if not places:
        return put(random, data, _others)
    place = random.choice(places)
    return data[: place.start()] + random.choice(NUMBERS).encode() + data[place.end() :]


def word(random, data, others):
    places = list(re.finditer(rb"[A-Za-z_][A-Za-z_0-9]*", data))
    words = re.findall(rb"[A-Za-z_][A-Za-z_0-9]*", random.choice(others))
    if not places or not words:
        return flip(random, data, others)
    place = random.choice(places)
    new = random.choice([random.choice(words), random.choice(TEXTS).encode()])
    return data[: place.start()] + new + data[place.end() :]


def lines(random, data, others):
    rows = data.splitlines(keepends=True)
    if len(rows) < 2:
        return splice(random, data, others)
    first, second = random.randrange(len(rows)), random.randrange(len(rows))
    what = random.randrange(4)
    if what == 0:
        del rows[first]
    elif what == 1:
        rows.insert(second, rows[first])
    elif what == 2:
        rows[first], rows[second] = rows[second], rows[first]
    else:
        rows[first] = random.choice(random.choice(others).splitlines(keepends=True) or [b"\n"])
    return b"".join(rows)


OF_BYTES = [flip, put, remove, repeat, cut, extend, splice]
OF_TEXT = OF_BYTES + [number, word, lines] * 3


def some_value(random, old):
    pick = random.randrange(8)
    if pick == 0:
        return random.choice([None, True, [], {}, (), 0.5, float("nan"), float("inf")])
    if pick == 1:
        return random.choice(TEXTS)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        value = random.choice([0, -1, 1, old + 1, old - 1, old * 2, -old, 2**31, 2**32, 2**63 - 1, 2**64 - 1, -(2**63), 511])
        return max(min(value, 2**64 - 1), -(2**63))
    if isinstance(old, str):
        return random.choice([old + random.choice(TEXTS), random.choice(TEXTS), old[: len(old) // 2]])
    if isinstance(old, (list, tuple)) and old:
        picked = random.randrange(4)
        items = list(old)
        if picked == 0:
            items.insert(random.randrange(len(items)), random.choice(items))
        elif picked == 1:
            del items[random.randrange(len(items))]
        elif picked == 2:
            random.shuffle(items)
        else:
            items = items[: random.randrange(len(items))]
        return type(old)(items)
    if isinstance(old, dict) and old:
        items = dict(old)
        key = random.choice(list(items))
        value = items.pop(key)
        if random.random() < 0.3 and isinstance(key, str):
            items[random.choice(TEXTS + [key + "x"])] = value
        return items
    return random.choice([0, "", [], {}])


def places(value, path=()):
    """The paths of all values in an object."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], path + (key,))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from places(item, path + (index,))


def replaced(value, path, new):
    if not path:
        return new(value)
    if isinstance(value, dict):
        return {key: replaced(item, path[1:], new) if key == path[0] else item for key, item in value.items()}
    items = list(value)
    items[path[0]] = replaced(items[path[0]], path[1:], new)
    return type(value)(items)


def of_object(random, value):
    paths = list(places(value))
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        path = random.choice(paths)
        try:
            value = replaced(value, path, lambda old: some_value(random, old))
        except (KeyError, IndexError, TypeError):
            continue  # An earlier change removed the place.
    return value


def of_pickle(random, data, _others):
    # The seeds are this repository's own files.
    return pickle.dumps(of_object(random, pickle.loads(data)), protocol=random.choice([2, 3, 4, 5]))


def of_json(random, data, _others):
    return json.dumps(of_object(random, json.loads(data)), ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
